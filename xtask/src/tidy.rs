//! `cargo xtask layers`: the rules about manifests and sources, applied to this workspace.

use crate::layers::{self, Role};
use crate::metadata::{Metadata, Package};
use crate::source::Source;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A crate that is to be read in one sitting: no more lines of code, nor in any function.
struct Thin {
    name: &'static str,
    most_lines: usize,
    most_fn_lines: usize,
}

/// See `docs/decisions/0004-a-trainer-below-700-lines.md`.
const THIN: &[Thin] = &[Thin { name: "tallow-train", most_lines: 699, most_fn_lines: 39 }];

/// Lines for the reader: violations fail the check, warnings do not.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) violations: Vec<String>,
    pub(crate) warnings: Vec<String>,
}

/// Prints the report and says whether there was no violation.
pub(crate) fn layers(metadata: &Metadata) -> Result<bool> {
    let report = report(metadata)?;
    for warning in &report.warnings {
        println!("warning: {warning}");
    }
    for violation in &report.violations {
        println!("error: {violation}");
    }
    let (n_violations, n_warnings) = (report.violations.len(), report.warnings.len());
    let n_crates = metadata.packages.len();
    println!("layers: {n_crates} crates, {n_violations} errors, {n_warnings} warnings");
    Ok(report.violations.is_empty())
}

fn report(metadata: &Metadata) -> Result<Report> {
    let violations = layers::violations(metadata);
    let mut report = Report { violations, warnings: Vec::new() };
    for package in &metadata.packages {
        read_sources(metadata, package, &mut report)?;
    }
    Ok(report)
}

fn read_sources(metadata: &Metadata, package: &Package, report: &mut Report) -> Result<()> {
    let role = layers::find(&package.name).map(|layer| layer.role);
    let is_library = matches!(role, Some(Role::Engine | Role::Facade));
    let root = package.manifest_path.with_file_name("src");
    let thin = THIN.iter().find(|thin| thin.name == package.name);
    let mut n_lines = 0;
    for path in rust_files(&root)? {
        let text =
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let source = Source::read(&text);
        let file = metadata.relative(&path);
        let long = source.long_parts().into_iter();
        report.warnings.extend(long.map(|(line, message)| format!("{file}:{line}: {message}")));
        n_lines += source.n_code_lines();
        if let Some(Thin { most_fn_lines: most, .. }) = thin {
            let long = source.functions_above(*most).into_iter();
            report.violations.extend(long.map(|(line, name, n)| {
                format!(
                    "{file}:{line}: fn {name} has {n} lines, more than the {most} of a thin crate"
                )
            }));
        }
        if !is_library {
            continue;
        }
        if path == root.join("lib.rs") && !source.has_page() {
            report.violations.push(format!("{file}: does not begin with a `//!` page"));
        }
        let acts = source.forbidden_acts().into_iter();
        report.violations.extend(acts.map(|(line, act)| {
            format!("{file}:{line}: `{act}`, but an engine prints nothing and reads no environment")
        }));
    }
    if let Some(Thin { name, most_lines, .. }) = thin
        && n_lines > *most_lines
    {
        let message = format!("{name}: {n_lines} lines of code, more than {most_lines}");
        report.violations.push(message);
    }
    Ok(())
}

/// The Rust files under `folder` that are not tests, sorted.
fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("reading {}", folder.display()))?.path();
        match path.file_stem().and_then(|stem| stem.to_str()) {
            Some("tests") => {}
            _ if path.is_dir() => files.extend(rust_files(&path)?),
            _ if path.extension().is_some_and(|extension| extension == "rs") => files.push(path),
            _ => {}
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A workspace of one crate on disk, in a folder that is removed on drop.
    struct OnDisk(PathBuf);

    impl OnDisk {
        fn new(test: &str, files: &[(&str, &str)]) -> OnDisk {
            let root = std::env::temp_dir().join(format!("xtask-{test}-{}", std::process::id()));
            for (name, text) in files {
                let path = root.join("src").join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            OnDisk(root)
        }

        fn report(&self, name: &str) -> Report {
            let package = Package {
                name: name.to_owned(),
                manifest_path: self.0.join("Cargo.toml"),
                dependencies: Vec::new(),
            };
            let metadata = Metadata { packages: vec![package], workspace_root: self.0.clone() };
            report(&metadata).unwrap()
        }
    }

    impl Drop for OnDisk {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn sources_are_judged_by_the_role_of_their_crate() {
        let long = "//\n".repeat(501);
        let disk = OnDisk::new(
            "roles",
            &[
                ("lib.rs", "mod a;"),
                ("a/b.rs", "fn f() {\n    println!();\n}"),
                ("a/long.rs", &long),
                ("tests.rs", "fn f() { println!(); }"),
                ("tests/c.rs", &long),
                ("notes.txt", "println!"),
            ],
        );
        let engine = disk.report("tallow-data");
        assert_eq!(
            engine.violations,
            [
                "src/a/b.rs:2: `println!`, but an engine prints nothing and reads no environment",
                "src/lib.rs: does not begin with a `//!` page",
            ]
        );
        let warning = "src/a/long.rs:1: 501 lines without tests, more than 500";
        assert_eq!(engine.warnings, [warning]);

        let binary = disk.report("tallow-cli");
        assert_eq!((binary.violations, binary.warnings), (vec![], vec![warning.to_owned()]));
    }

    #[test]
    fn a_thin_crate_stays_thin() {
        let text = |n_lines: usize| {
            let function = format!("fn f() {{\n{}}}\n", "    g();\n\n".repeat(n_lines - 2));
            format!("//! Page.\n{function}")
        };
        let short: String = (0..20).map(|_| text(21).replace("    g();\n\n", "g();\n")).collect();
        let disk = OnDisk::new("thin", &[("lib.rs", &short), ("a.rs", &text(20))]);
        let thin = disk.report("tallow-train").violations;
        assert_eq!(thin, [""; 0]);
        let disk = OnDisk::new("thick", &[("lib.rs", &short.repeat(2)), ("a.rs", &text(21))]);
        let thick = disk.report("tallow-train").violations;
        assert_eq!(
            thick,
            [
                "src/a.rs:2: fn f has 40 lines, more than the 39 of a thin crate",
                "tallow-train: 861 lines of code, more than 699",
            ]
        );
        assert_eq!(disk.report("tallow-data").violations, [""; 0]);
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = rust_files(Path::new("no/such/folder")).unwrap_err();
        assert!(error.to_string().contains("no/such/folder"), "{error:#}");
    }
}
