//! The arrows of the design, as a table, and the rules about what a manifest may name.

use crate::metadata::{Dependency, Kind, Metadata, Package};

/// What a crate is for; several rules hold for a role and not for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A library that a user may take alone. The crates where engines meet count: the same rules hold
    /// for them.
    Engine,
    /// Re-exports engines; may use every one.
    Facade,
    /// The command line.
    Binary,
    /// A dev-dependency of the others.
    TestKit,
    /// The workspace's own commands.
    Task,
    /// May use whatever it measures.
    Bench,
    /// A program for people to read.
    Example,
}

/// A crate of the workspace and the crates that it may depend on.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) name: &'static str,
    pub(crate) role: Role,
    may_use: &'static [&'static str],
}

const fn layer(name: &'static str, role: Role, may_use: &'static [&'static str]) -> Layer {
    Layer { name, role, may_use }
}

const KERNELS: &[&str] = &["tallow-kernels"];

/// Top to bottom. An edge that is not here is forbidden.
pub(crate) const LAYERS: &[Layer] = &[
    layer("xtask", Role::Task, &[]),
    layer("tallow-bench", Role::Bench, &[]),
    layer("nano", Role::Example, &["tallow"]),
    layer("candle-drop-in", Role::Example, &["tallow-recompute", "tallow-memory"]),
    layer("tallow", Role::Facade, &[]),
    layer(
        "tallow-cli",
        Role::Binary,
        // Beside the run and its trainer: it opens sources, installs the allocator and names models.
        &["tallow-run", "tallow-train", "tallow-data", "tallow-memory", "tallow-models"],
    ),
    layer(
        "tallow-run",
        Role::Engine,
        &[
            "tallow-train",
            "tallow-checkpoint",
            "tallow-data",
            "tallow-models",
            // Its tests train small networks of layers.
            "tallow-tensor",
        ],
    ),
    layer(
        "tallow-train",
        Role::Engine,
        &[
            "tallow-plan",
            "tallow-backward",
            "tallow-checkpoint",
            "tallow-precision",
            "tallow-recompute",
            "tallow-accum",
            "tallow-optim",
            "tallow-data",
            "tallow-memory",
            "tallow-shard",
            "tallow-models",
            // The trainer finds parameters without a gradient, and marks the step.
            "tallow-tensor",
        ],
    ),
    layer(
        "tallow-plan",
        Role::Engine,
        &[
            // It runs the segments that it prices,
            "tallow-backward",
            "tallow-models",
            "tallow-tensor",
            // and asks each engine for the price of the rest.
            "tallow-precision",
            "tallow-recompute",
            "tallow-accum",
            "tallow-optim",
            "tallow-data",
            "tallow-memory",
        ],
    ),
    layer(
        "tallow-backward",
        Role::Engine,
        &[
            "tallow-precision",
            "tallow-recompute",
            "tallow-optim",
            "tallow-memory",
            "tallow-models",
            "tallow-tensor",
        ],
    ),
    layer("tallow-models", Role::Engine, &["tallow-tensor"]),
    layer("tallow-tensor", Role::Engine, KERNELS),
    layer("tallow-precision", Role::Engine, KERNELS),
    layer("tallow-accum", Role::Engine, KERNELS),
    layer("tallow-optim", Role::Engine, KERNELS),
    layer("tallow-kernels", Role::Engine, &[]),
    layer("tallow-recompute", Role::Engine, &[]),
    layer("tallow-data", Role::Engine, &[]),
    layer("tallow-memory", Role::Engine, &[]),
    layer("tallow-checkpoint", Role::Engine, &[]),
    layer("tallow-shard-mpi", Role::Engine, &["tallow-shard"]),
    layer("tallow-shard", Role::Engine, &[]),
    layer("tallow-testkit", Role::TestKit, &[]),
];

/// Any crate may test with these: references, and the allocator that counts bytes.
const TEST_TOOLS: &[&str] = &["tallow-testkit", "tallow-memory"];

/// Engines return small error enums, take no configuration files and print nothing.
const NOT_IN_ENGINES: &[&str] = &["anyhow", "clap", "indicatif", "serde", "serde_json"];

/// The row of a crate.
pub(crate) fn find(name: &str) -> Option<&'static Layer> {
    LAYERS.iter().find(|layer| layer.name == name)
}

/// What is wrong with the manifests; empty if nothing is.
pub(crate) fn violations(metadata: &Metadata) -> Vec<String> {
    let mut violations = Vec::new();
    for package in &metadata.packages {
        let manifest = metadata.relative(&package.manifest_path);
        let Some(from) = find(&package.name) else {
            let name = &package.name;
            violations.push(format!(
                "{manifest}: `{name}` has no row in the table of xtask/src/layers.rs"
            ));
            continue;
        };
        let found = package.dependencies.iter();
        let found = found.filter_map(|dependency| violation(metadata, from, dependency));
        violations.extend(found.map(|found| format!("{manifest}: {found}")));
    }
    violations
}

fn violation(metadata: &Metadata, from: &Layer, dependency: &Dependency) -> Option<String> {
    let (name, to) = (from.name, &dependency.name);
    if is_member(metadata, to) {
        return match dependency.kind {
            _ if may_use(from, to) => None,
            Some(Kind::Dev) if TEST_TOOLS.contains(&&**to) => None,
            Some(Kind::Dev) => {
                Some(format!("the dev-dependency `{name}` -> `{to}` is not an arrow of the design"))
            }
            None | Some(Kind::Build) => {
                Some(format!("the dependency `{name}` -> `{to}` is not an arrow of the design"))
            }
        };
    }
    let banned = match from.role {
        _ if dependency.kind == Some(Kind::Dev) => false,
        Role::Engine | Role::Facade => NOT_IN_ENGINES.contains(&&**to),
        Role::TestKit | Role::Bench => to == "anyhow",
        Role::Binary | Role::Task | Role::Example => false,
    };
    banned.then(|| format!("`{name}` must not depend on `{to}`"))
}

fn is_member(metadata: &Metadata, name: &str) -> bool {
    let is_it = |package: &Package| package.name == name;
    metadata.packages.iter().any(is_it)
}

fn may_use(from: &Layer, to: &str) -> bool {
    match from.role {
        Role::Bench => true,
        Role::Facade => find(to).is_some_and(|to| to.role == Role::Engine),
        _ => from.may_use.contains(&to),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A workspace from rows of a crate and its dependencies; `dev:` and `build:` give the kind.
    fn workspace(rows: &[(&str, &[&str])]) -> Metadata {
        let dependency = |text: &&str| {
            let (kind, name) = match text.split_once(':') {
                Some(("dev", name)) => (Some(Kind::Dev), name),
                Some((_, name)) => (Some(Kind::Build), name),
                None => (None, *text),
            };
            let name = name.to_owned();
            Dependency { name, kind }
        };
        let package = |(name, dependencies): &(&str, &[&str])| Package {
            name: (*name).to_owned(),
            manifest_path: PathBuf::from(format!("/w/crates/{name}/Cargo.toml")),
            dependencies: dependencies.iter().map(dependency).collect(),
        };
        Metadata {
            packages: rows.iter().map(package).collect(),
            workspace_root: PathBuf::from("/w"),
        }
    }

    /// A workspace of every crate in the table where `from` has one dependency.
    fn with_edge(from: &str, dependency: &str) -> Metadata {
        let to: &[&str] = &[dependency];
        let row = |layer: &Layer| (layer.name, if layer.name == from { to } else { &[] });
        workspace(&LAYERS.iter().map(row).collect::<Vec<_>>())
    }

    #[test]
    fn declared_edges_pass() {
        let rows = [
            ("tallow-cli", "tallow-run"),
            ("tallow-cli", "tallow-memory"),
            ("tallow-run", "tallow-train"),
            ("tallow-train", "tallow-plan"),
            ("tallow-plan", "tallow-backward"),
            ("tallow-backward", "tallow-models"),
            ("tallow-cli", "anyhow"),
            ("tallow-cli", "clap"),
            ("tallow-train", "tallow-tensor"),
            ("tallow-train", "tallow-shard"),
            ("tallow-models", "tallow-tensor"),
            ("tallow-optim", "tallow-kernels"),
            ("tallow-shard-mpi", "tallow-shard"),
            ("tallow", "tallow-train"),
            ("tallow", "tallow-kernels"),
            ("tallow-bench", "tallow-kernels"),
            ("tallow-bench", "tallow-testkit"),
            ("tallow-kernels", "half"),
            ("tallow-kernels", "dev:tallow-testkit"),
            ("tallow-testkit", "dev:tallow-memory"),
            ("tallow-models", "dev:tallow-memory"),
            ("tallow-models", "dev:serde_json"),
            ("tallow-models", "dev:tallow-tensor"),
            ("tallow-testkit", "serde_json"),
            ("xtask", "anyhow"),
        ];
        for (from, to) in rows {
            assert_eq!(violations(&with_edge(from, to)), [""; 0], "{from} -> {to}");
        }
    }

    #[test]
    fn undeclared_edges_fail() {
        let rows = [
            ("tallow-kernels", "tallow-tensor"),
            ("tallow-models", "tallow-kernels"),
            ("tallow-optim", "tallow-accum"),
            ("tallow-recompute", "tallow-kernels"),
            ("tallow-data", "tallow-memory"),
            ("tallow-shard", "tallow-shard-mpi"),
            ("tallow-train", "tallow-kernels"),
            ("tallow-train", "tallow-run"),
            ("tallow-plan", "tallow-train"),
            ("tallow-backward", "tallow-accum"),
            ("tallow-checkpoint", "tallow-memory"),
            ("tallow-cli", "tallow-tensor"),
            ("tallow-models", "build:tallow-data"),
            ("tallow-tensor", "tallow-testkit"),
            ("tallow", "tallow-testkit"),
            ("tallow", "tallow-cli"),
            ("tallow-testkit", "tallow-kernels"),
            ("xtask", "tallow-train"),
        ];
        for (from, to) in rows {
            let found = violations(&with_edge(from, to));
            let to = to.trim_start_matches("build:");
            let message = format!(
                "crates/{from}/Cargo.toml: the dependency `{from}` -> `{to}` is not an arrow of the design"
            );
            assert_eq!(found, [message]);
        }
    }

    #[test]
    fn undeclared_dev_edges_fail() {
        for (from, to) in [("tallow-data", "tallow-tensor"), ("tallow-kernels", "tallow")] {
            let found = violations(&with_edge(from, &format!("dev:{to}")));
            let message = format!(
                "crates/{from}/Cargo.toml: the dev-dependency `{from}` -> `{to}` is not an arrow of the design"
            );
            assert_eq!(found, [message]);
        }
    }

    #[test]
    fn forbidden_libraries_fail() {
        let engines = ["tallow-kernels", "tallow-train", "tallow"];
        let engines = engines.map(|from| NOT_IN_ENGINES.iter().map(move |to| (from, *to)));
        let anyhow = [("tallow-testkit", "anyhow"), ("tallow-bench", "anyhow")];
        for (from, to) in engines.into_iter().flatten().chain(anyhow) {
            let message = format!("crates/{from}/Cargo.toml: `{from}` must not depend on `{to}`");
            assert_eq!(violations(&with_edge(from, to)), [message]);
        }
    }

    #[test]
    fn every_violation_is_reported() {
        let metadata = workspace(&[
            ("tallow-data", &["tallow-shard", "clap", "dev:tallow-shard"]),
            ("tallow-shard", &["tallow-data"]),
        ]);
        assert_eq!(violations(&metadata).len(), 4);
    }

    #[test]
    fn a_crate_outside_the_table_fails() {
        let found = violations(&workspace(&[("tallow-core", &[])]));
        assert_eq!(
            found,
            [
                "crates/tallow-core/Cargo.toml: `tallow-core` has no row in the table of xtask/src/layers.rs"
            ]
        );
    }

    #[test]
    fn the_table_is_closed_and_has_no_cycle() {
        // Every arrow leads to a row, and dropping rows without arrows again and again ends empty.
        let mut rows: Vec<&Layer> = LAYERS.iter().collect();
        assert!(rows.iter().all(|row| row.may_use.iter().all(|to| find(to).is_some())));
        while !rows.is_empty() {
            let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
            rows.retain(|row| row.may_use.iter().any(|to| names.contains(to)));
            assert!(rows.len() < names.len(), "a cycle among {names:?}");
        }
    }

    #[test]
    fn metadata_is_parsed() {
        let json = br#"{"workspace_root": "/w", "version": 1, "packages": [{
            "name": "tallow-data", "manifest_path": "/w/crates/d/Cargo.toml", "dependencies": [
                {"name": "tallow-data", "kind": null, "optional": true, "rename": "x"},
                {"name": "clap", "kind": "dev"}, {"name": "clap", "kind": "build"}]}]}"#;
        let found = violations(&Metadata::parse(json).unwrap());
        assert_eq!(
            found,
            [
                "crates/d/Cargo.toml: the dependency `tallow-data` -> `tallow-data` is not an arrow of the design",
                "crates/d/Cargo.toml: `tallow-data` must not depend on `clap`",
            ]
        );
        let error = Metadata::parse(b"{}").unwrap_err();
        assert!(format!("{error:#}").contains("cargo metadata"), "{error:#}");
    }
}
