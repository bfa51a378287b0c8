//! Fake trees of `proc` and `sys/fs/cgroup`.
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};
use tallow_memory::limits::{Limits, Notice, Source, limits};

const GIB: u64 = 1 << 30;
const USAGE: u64 = 3 * GIB / 2;
const CACHE: u64 = 4 * GIB / 10;
const V1_UNLIMITED: u64 = 9_223_372_036_854_771_712;

/// A directory of its own for each tree, removed at the end.
struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Tree {
    fn of(files: &[(&str, String)]) -> Tree {
        static N_TREES: AtomicU32 = AtomicU32::new(0);
        let n = N_TREES.fetch_add(1, Ordering::Relaxed);
        let root = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("limits-{}-{n}", std::process::id()));
        let tree = Tree(root);
        files.iter().for_each(|(path, text)| tree.write(path, text));
        tree
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn remove(&self, path: &str) {
        let path = self.0.join(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    fn limits(&self) -> Limits {
        limits(&self.0)
    }
}

fn host_files(own_group: &str) -> Vec<(&'static str, String)> {
    let kib = 64 * GIB / 1024;
    let meminfo = format!("MemTotal: {kib} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n");
    let rlimits = "Limit  Soft Limit  Hard Limit  Units\n\
                   Max data size  unlimited  unlimited  bytes\n\
                   Max address space  unlimited  unlimited  bytes\n";
    vec![
        ("proc/meminfo", meminfo),
        ("proc/self/cgroup", own_group.to_owned()),
        ("proc/self/limits", rlimits.to_owned()),
        ("proc/self/status", "VmSize:\t 2048 kB\nVmData:\t 1024 kB\n".to_owned()),
    ]
}

/// Child `max`, parent 2 GiB, grandparent 3 GiB; the mount's root has no limits of its own.
fn v2_tree() -> Tree {
    let mut files = host_files("0::/grand/parent/child\n");
    let stat = format!("anon 1\ninactive_file {CACHE}\nactive_file 77\n");
    let rows = [
        ("grand", (3 * GIB).to_string()),
        ("grand/parent", (2 * GIB).to_string()),
        ("grand/parent/child", "max".to_owned()),
    ];
    let tree = Tree::of(&std::mem::take(&mut files));
    for (group, limit) in rows {
        let directory = format!("sys/fs/cgroup/{group}");
        tree.write(&format!("{directory}/memory.max"), &format!("{limit}\n"));
        tree.write(&format!("{directory}/memory.current"), &format!("{USAGE}\n"));
        tree.write(&format!("{directory}/memory.stat"), &stat);
    }
    tree
}

fn v1_tree() -> Tree {
    let tree = Tree::of(&host_files("9:cpu:/x\n4:hugetlb,memory:/grand/parent/child\n0::/\n"));
    let rows = [
        ("", V1_UNLIMITED),
        ("/grand", 3 * GIB),
        ("/grand/parent", 2 * GIB),
        ("/grand/parent/child", V1_UNLIMITED),
    ];
    let mut lowest = V1_UNLIMITED;
    for (group, limit) in rows {
        lowest = lowest.min(limit);
        let directory = format!("sys/fs/cgroup/memory{group}");
        let stat = format!(
            "inactive_file 5\nhierarchical_memory_limit {lowest}\ntotal_inactive_file {CACHE}\n"
        );
        tree.write(&format!("{directory}/memory.limit_in_bytes"), &format!("{limit}\n"));
        tree.write(&format!("{directory}/memory.usage_in_bytes"), &format!("{USAGE}\n"));
        tree.write(&format!("{directory}/memory.stat"), &stat);
    }
    tree
}

#[test]
fn mem_3_an_ancestors_limit_binds() {
    for tree in [v2_tree(), v1_tree()] {
        let limits = tree.limits();
        assert_eq!(limits.notices, []);
        assert_eq!((limits.host_bytes, limits.rlimit_bytes), (Some(64 * GIB), None));
        assert_eq!((limits.cgroup_bytes, limits.limit_bytes()), (Some(2 * GIB), Some(2 * GIB)));
        assert_eq!((limits.usage_bytes, limits.reclaimable_bytes), (USAGE, CACHE));
        // 2 GiB - (1.5 - 0.4) GiB
        assert_eq!(limits.headroom_bytes(), Some(2 * GIB - (USAGE - CACHE)));
        let Source::Cgroup(path) = &limits.lowest().unwrap().source else { panic!() };
        assert!(path.ends_with("grand/parent"), "{path:?}");
    }
}

#[test]
fn mem_3_a_busy_sibling_takes_the_wider_limits_headroom() {
    let tree = v2_tree();
    tree.write("sys/fs/cgroup/grand/memory.current", &(29 * GIB / 10).to_string());
    tree.write("sys/fs/cgroup/grand/memory.stat", "inactive_file 0\n");
    let limits = tree.limits();
    assert_eq!(limits.limit_bytes(), Some(2 * GIB));
    assert_eq!(limits.headroom_bytes(), Some(3 * GIB - 29 * GIB / 10));
}

#[test]
fn mem_3_no_limit_is_the_host() {
    let (v2, v1) = (v2_tree(), v1_tree());
    for group in ["grand", "grand/parent"] {
        v2.write(&format!("sys/fs/cgroup/{group}/memory.max"), "max\n");
        let directory = format!("sys/fs/cgroup/memory/{group}");
        v1.write(&format!("{directory}/memory.limit_in_bytes"), &V1_UNLIMITED.to_string());
    }
    for group in ["grand", "grand/parent", "grand/parent/child"] {
        let stat = format!("hierarchical_memory_limit {V1_UNLIMITED}\ntotal_inactive_file 0\n");
        v1.write(&format!("sys/fs/cgroup/memory/{group}/memory.stat"), &stat);
    }
    for tree in [v2, v1] {
        let limits = tree.limits();
        assert_eq!(limits.notices, []);
        assert_eq!((limits.cgroup_bytes, limits.limit_bytes()), (None, Some(64 * GIB)));
        assert_eq!(limits.headroom_bytes(), Some(64 * GIB));
    }
}

#[test]
fn mem_3_missing_files_are_a_notice_and_the_host() {
    let all_gone: fn(&Tree) = |tree| tree.remove("sys/fs/cgroup");
    let no_file: fn(&Tree) = |tree| {
        tree.remove("sys/fs/cgroup/grand/memory.max");
        tree.remove("sys/fs/cgroup/grand/parent/memory.max");
    };
    let no_group: fn(&Tree) = |tree| tree.remove("proc/self/cgroup");
    let removals = [(all_gone, 1), (no_file, 2), (no_group, 1)];
    for (remove, n_notices) in removals {
        let tree = v2_tree();
        remove(&tree);
        let limits = tree.limits();
        assert_eq!((limits.cgroup_bytes, limits.limit_bytes()), (None, Some(64 * GIB)));
        assert_eq!(limits.notices.len(), n_notices, "{:?}", limits.notices);
        assert!(limits.notices.iter().all(|notice| matches!(notice, Notice::Unreadable { .. })));
    }
}

#[test]
fn mem_3_a_group_without_the_controller_is_no_notice() {
    let tree = v2_tree();
    let child = "sys/fs/cgroup/grand/parent/child";
    tree.remove(&format!("{child}/memory.max"));
    tree.write(&format!("{child}/cgroup.controllers"), "cpu pids\n");
    let limits = tree.limits();
    assert_eq!((limits.limit_bytes(), limits.notices.len()), (Some(2 * GIB), 0));
    tree.write(&format!("{child}/cgroup.controllers"), "cpu memory pids\n");
    assert_eq!(tree.limits().notices.len(), 1);
}

#[test]
fn mem_3_v2_beside_v1_is_one_level_down() {
    let tree = Tree::of(&host_files("9:cpu:/x\n0::/job\n"));
    tree.write("sys/fs/cgroup/unified/job/memory.max", "5000\n");
    tree.write("sys/fs/cgroup/unified/job/memory.current", "1000\n");
    tree.write("sys/fs/cgroup/unified/job/memory.stat", "inactive_file 300\n");
    let limits = tree.limits();
    assert_eq!((limits.limit_bytes(), limits.headroom_bytes()), (Some(5000), Some(4300)));
}

#[test]
fn mem_3_garbled_files_are_a_notice_and_the_host() {
    for garbage in
        ["", "lots", "-1", "+5", "12 GiB", "2147483648 7", "\u{fffd}", "99999999999999999999"]
    {
        let tree = v2_tree();
        tree.write("sys/fs/cgroup/grand/memory.max", garbage);
        tree.write("sys/fs/cgroup/grand/parent/memory.max", garbage);
        let limits = tree.limits();
        assert_eq!((limits.cgroup_bytes, limits.limit_bytes()), (None, Some(64 * GIB)));
        assert_eq!(limits.notices.len(), 2, "{garbage:?}");
        let message = limits.notices[0].to_string();
        assert!(message.starts_with("sys/fs/cgroup/grand/memory.max should be"), "{message}");
    }
    let tree = v2_tree();
    tree.write("proc/self/cgroup", "what is this\n0:\n");
    assert_eq!(tree.limits().limit_bytes(), Some(64 * GIB));
    assert!(matches!(tree.limits().notices[..], [Notice::Garbled { field: "memory", .. }]));
}

#[test]
fn mem_3_a_group_outside_the_namespace_is_the_mounts_root() {
    for group in ["/docker/0123abcd", "/../..", "/../grand"] {
        let tree = v2_tree();
        tree.write("proc/self/cgroup", &format!("0::{group}\n"));
        tree.write("sys/fs/cgroup/memory.max", &(5 * GIB).to_string());
        tree.write("sys/fs/cgroup/memory.current", &GIB.to_string());
        tree.write("sys/fs/cgroup/memory.stat", "inactive_file 0\n");
        let limits = tree.limits();
        assert_eq!((limits.limit_bytes(), limits.headroom_bytes()), (Some(5 * GIB), Some(4 * GIB)));
        assert!(
            matches!(&limits.notices[..], [Notice::NoSuchGroup { group: g, .. }] if g == group)
        );
    }
    // In a namespace of its own the process is at the root, and that is as it should be.
    let tree = v2_tree();
    tree.write("proc/self/cgroup", "0::/\n");
    tree.write("sys/fs/cgroup/memory.max", "1000\n");
    tree.write("sys/fs/cgroup/memory.current", "400\n");
    tree.write("sys/fs/cgroup/memory.stat", "inactive_file 0\n");
    let limits = tree.limits();
    assert_eq!((limits.headroom_bytes(), limits.notices.len()), (Some(600), 0));
}

#[test]
fn mem_3_v1_tells_of_limits_it_hides() {
    let tree = v1_tree();
    tree.write("proc/self/cgroup", "4:memory:/docker/0123abcd\n");
    let stat = format!("hierarchical_memory_limit {GIB}\ntotal_inactive_file 0\n");
    tree.write("sys/fs/cgroup/memory/memory.stat", &stat);
    assert_eq!(tree.limits().limit_bytes(), Some(GIB));
}

#[test]
fn mem_3_the_lower_of_budget_and_machine_wins() {
    let tree = v2_tree();
    let low = tree.limits().with_budget(GIB, GIB / 4);
    assert_eq!((low.limit_bytes(), low.headroom_bytes()), (Some(GIB), Some(3 * GIB / 4)));
    assert_eq!((low.usage_bytes, low.notices.len()), (GIB / 4, 0));
    let high = tree.limits().with_budget(8 * GIB, 0);
    assert_eq!(high.limit_bytes(), Some(2 * GIB));
    let notice = Notice::BudgetAboveLimit { budget_bytes: 8 * GIB, limit_bytes: 2 * GIB };
    assert_eq!(high.notices, [notice]);
    // Nothing is known of the machine: the budget is all there is.
    let unknown = Limits::default();
    assert_eq!((unknown.limit_bytes(), unknown.headroom_bytes()), (None, None));
    assert_eq!(unknown.with_budget(GIB, 0).limit_bytes(), Some(GIB));
}

#[test]
fn memory_high_and_zero_are_limits() {
    let tree = v2_tree();
    tree.write("sys/fs/cgroup/grand/parent/child/memory.high", &GIB.to_string());
    let limits = tree.limits();
    assert_eq!((limits.limit_bytes(), limits.headroom_bytes()), (Some(GIB), Some(0))); // 1.1 used
    tree.write("sys/fs/cgroup/grand/parent/child/memory.max", "0\n");
    assert_eq!(tree.limits().limit_bytes(), Some(0));
}

#[test]
fn soft_rlimits_count_against_the_address_space() {
    let tree = v2_tree();
    let rlimits = "Max data size  unlimited  unlimited  bytes\n\
                   Max address space  4194304  unlimited  bytes\n";
    tree.write("proc/self/limits", rlimits);
    let limits = tree.limits();
    assert_eq!((limits.rlimit_bytes, limits.limit_bytes()), (Some(4 << 20), Some(4 << 20)));
    assert_eq!((limits.usage_bytes, limits.headroom_bytes()), (2 << 20, Some(2 << 20)));
    tree.write("proc/self/limits", "Max address space  soon\n");
    let limits = tree.limits();
    assert_eq!((limits.rlimit_bytes, limits.notices.len()), (None, 2));
}

/// Whatever a tree holds, reading it ends in limits and notices.
#[test]
fn no_tree_panics() {
    let tree = Tree::of(&[]);
    let limits = tree.limits();
    assert_eq!((limits.limit_bytes(), limits.notices.len()), (None, 3));
    let tree = v2_tree();
    for path in ["proc/meminfo", "proc/self/cgroup", "proc/self/limits", "proc/self/status"] {
        let text = fs::read_to_string(tree.0.join(path)).unwrap();
        for end in 0..text.len() {
            tree.write(path, &text[..end]);
            let _ = tree.limits();
        }
        tree.write(path, &text);
    }
    tree.remove("proc/meminfo");
    fs::create_dir(tree.0.join("proc/meminfo")).unwrap(); // readable as nothing
    assert_eq!(tree.limits().host_bytes, None);
}

#[test]
#[cfg(target_os = "linux")]
fn this_machine_has_a_limit() {
    let limits = limits(Path::new("/"));
    assert!(limits.host_bytes.is_some_and(|bytes| bytes > 0), "{:?}", limits.notices);
    assert!(limits.headroom_bytes() <= limits.limit_bytes());
}
