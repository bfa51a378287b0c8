use super::{Bound, NO_LIMIT_BYTES, Notice, Source, read::Reader};
use std::path::{Component, Path, PathBuf};

/// The names that differ between the two versions.
struct Names {
    mount: &'static str,
    limits: &'static [&'static str],
    usage: &'static str,
    /// Field of `memory.stat`.
    reclaimable: &'static str,
    /// Field of `memory.stat` that repeats the lowest limit of the groups above, seen or not.
    inherited: Option<&'static str>,
}

const V1: Names = Names {
    mount: "sys/fs/cgroup/memory",
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
    inherited: Some("hierarchical_memory_limit"),
};

const V2: Names = Names {
    mount: "sys/fs/cgroup",
    // Above `memory.high` the kernel does not kill, it slows the group to a crawl.
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: "inactive_file",
    inherited: None,
};

/// The bounds of the process's group and of those above it, from the mount's root down.
pub(super) fn bounds(reader: &mut Reader<'_>) -> Vec<Bound> {
    let Some((names, group)) = own_group(reader) else { return Vec::new() };
    let mount = Path::new(names.mount);
    if !reader.is_dir(mount) {
        let (path, reason) = (mount.to_owned(), "no such directory".to_owned());
        reader.push(Notice::Unreadable { path, reason });
        return Vec::new();
    }
    let own = own_directory(reader, mount, &group);
    let below_mount = own.strip_prefix(mount).unwrap_or(Path::new("")).components();
    let mut directory = mount.to_owned();
    let mut bounds: Vec<Bound> = level(reader, &names, &directory, true).into_iter().collect();
    for component in below_mount {
        directory.push(component);
        bounds.extend(level(reader, &names, &directory, false));
    }
    bounds
}

/// Where `/proc/self/cgroup` says the memory controller is. A line is `id:controllers:path`; v1
/// names its controllers, v2 is `0::path`. Only one hierarchy can have the controller, and with
/// both mounted it is v1's if a line there names it.
fn own_group(reader: &mut Reader<'_>) -> Option<(Names, String)> {
    let path = Path::new("proc/self/cgroup");
    let text = reader.text(path)?;
    let line = |wanted: fn(&str, &str) -> bool| {
        text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (id, controllers, group) = (parts.next()?, parts.next()?, parts.next()?);
            wanted(id, controllers).then(|| group.to_owned())
        })
    };
    let v1 = line(|_, controllers| controllers.split(',').any(|name| name == "memory"));
    let v2 = line(|id, controllers| id == "0" && controllers.is_empty());
    // Beside v1 hierarchies v2 is mounted one level down.
    let beside_v1 = "sys/fs/cgroup/unified";
    let mount = if reader.is_dir(Path::new(beside_v1)) { beside_v1 } else { V2.mount };
    match (v1, v2) {
        (Some(group), _) => Some((V1, group)),
        (None, Some(group)) => Some((Names { mount, ..V2 }, group)),
        (None, None) => {
            let found = text.trim().chars().take(64).collect();
            reader.push(Notice::Garbled { path: path.to_owned(), field: "memory", found });
            None
        }
    }
}

/// The group's directory, or the mount itself where it is not visible.
fn own_directory(reader: &mut Reader<'_>, mount: &Path, group: &str) -> PathBuf {
    let below = group.trim_start_matches('/');
    // A process outside its namespace's root is at `/../..`: there is no way to it from here.
    let plain = Path::new(below).components().all(|part| matches!(part, Component::Normal(_)));
    let directory = mount.join(if plain { below } else { "" });
    if plain && reader.is_dir(&directory) {
        return directory;
    }
    let (group, instead) = (group.to_owned(), mount.to_owned());
    reader.push(Notice::NoSuchGroup { group, instead });
    mount.to_owned()
}

/// The bound of one group; `None` where it sets no limit. The true root of v2 has no files to say so.
fn level(
    reader: &mut Reader<'_>,
    names: &Names,
    directory: &Path,
    is_mount: bool,
) -> Option<Bound> {
    let may_lack_limits = is_mount || lacks_controller(reader, directory);
    let mut limits_bytes = Vec::new();
    for (i, name) in names.limits.iter().enumerate() {
        let path = directory.join(name);
        // Old kernels have no second file.
        let text = match may_lack_limits || i > 0 {
            true => reader.optional_text(&path),
            false => reader.text(&path),
        };
        limits_bytes.extend(text.and_then(|text| reader.limit(&path, &text)));
    }
    let stat_path = directory.join("memory.stat");
    let stat = reader.optional_text(&stat_path);
    if let (Some(field), Some(stat)) = (names.inherited, &stat) {
        let inherited_bytes = reader.field(&stat_path, stat, field);
        limits_bytes.extend(inherited_bytes.filter(|bytes| *bytes < NO_LIMIT_BYTES));
    }
    let limit_bytes = limits_bytes.into_iter().min()?;
    let usage_path = directory.join(names.usage);
    let usage = reader.text(&usage_path);
    let usage_bytes = usage.and_then(|text| reader.number(&usage_path, &text));
    let stat = stat.or_else(|| reader.text(&stat_path));
    let reclaimable_bytes =
        stat.and_then(|stat| reader.field(&stat_path, &stat, names.reclaimable));
    Some(Bound {
        source: Source::Cgroup(directory.to_owned()),
        limit_bytes,
        usage_bytes: usage_bytes.unwrap_or_default(),
        reclaimable_bytes: reclaimable_bytes.unwrap_or_default(),
    })
}

/// Whether v2 says that this group is without the memory controller, and so without its files.
fn lacks_controller(reader: &mut Reader<'_>, directory: &Path) -> bool {
    let controllers = reader.optional_text(&directory.join("cgroup.controllers"));
    controllers.is_some_and(|names| names.split_whitespace().all(|name| name != "memory"))
}
