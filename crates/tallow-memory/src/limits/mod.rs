//! How much memory the process may hold: the host's, its control groups', its own rlimits.
//!
//! In a container the host's figure is the wrong one: the kernel ends the process at the limit of
//! its control group, or of any group above it. [`limits`] reads them all, for cgroup v1 and v2.
//! Each is a [`Bound`] with its own usage, because a parent's limit is shared with the parent's
//! other children:
//!
//! ```text
//! headroom of a bound = limit - (usage - reclaimable)      limit    = the lowest of the bounds
//!                                                          headroom = the lowest of the bounds
//! ```
//!
//! | bound | limit | usage | reclaimable |
//! |---|---|---|---|
//! | host | `MemTotal` | `MemTotal - MemFree` | `MemAvailable - MemFree` |
//! | cgroup v2 | lower of `memory.max`, `memory.high` | `memory.current` | `inactive_file` |
//! | cgroup v1 | lower of `memory.limit_in_bytes`, `hierarchical_memory_limit` | `memory.usage_in_bytes` | `total_inactive_file` |
//! | rlimit | address space | `VmSize` | 0 |
//! | rlimit | data size | `VmData` | 0 |
//! | budget | the caller's | the caller's | 0 |
//!
//! Only the inactive file cache counts as reclaimable: the kernel drops it first and at no cost.
//! Active pages are code and data in use. `max`, and values from 2^62 on (v1's way to say it), are
//! no limit. Swap is not counted. Groups are looked for where systems mount them, not in the table of
//! mounts, and v1 groups are taken to count their children (the default of every container). What is missing or garbled is a [`Notice`], never an error: the
//! other bounds hold.
//!
//! ```no_run
//! use tallow_memory::limits::limits;
//!
//! let limits = limits("/".as_ref()).with_budget(512 << 20, 0);
//! let (limit_bytes, headroom_bytes) = (limits.limit_bytes(), limits.headroom_bytes());
//! # let _ = (limit_bytes, headroom_bytes);
//! ```

mod cgroup;
mod read;

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// From here on a number means "no limit": v1 writes the largest multiple of a page.
pub(crate) const NO_LIMIT_BYTES: u64 = 1 << 62;

/// Who sets a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The machine.
    Host,
    /// A control group, by its directory below the root that was read.
    Cgroup(PathBuf),
    /// `RLIMIT_AS`, the soft one.
    AddressSpace,
    /// `RLIMIT_DATA`, the soft one.
    DataSize,
    /// The caller of [`Limits::with_budget`].
    Budget,
}

/// One limit and how much of it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Who sets it.
    pub source: Source,
    /// Bytes that may be used.
    pub limit_bytes: u64,
    /// Bytes used, by everyone under this limit.
    pub usage_bytes: u64,
    /// Of those, bytes that the kernel gives up without cost.
    pub reclaimable_bytes: u64,
}

impl Bound {
    /// `limit - (usage - reclaimable)`, 0 when more than the limit is used.
    pub fn headroom_bytes(&self) -> u64 {
        let used_bytes = self.usage_bytes.saturating_sub(self.reclaimable_bytes);
        self.limit_bytes.saturating_sub(used_bytes)
    }
}

/// Something that could not be read as expected; paths are below the root that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A file is not there, or may not be read.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        reason: String,
    },
    /// A file, or the line of it that matters, is not what the kernel documents.
    Garbled {
        /// The file.
        path: PathBuf,
        /// The field looked for; empty when the file is one number.
        field: &'static str,
        /// What was found, at most 64 characters of it.
        found: String,
    },
    /// The process's group is not visible, as in a container with a namespace of its own; the
    /// mount's root was read instead.
    NoSuchGroup {
        /// The group, as `/proc/self/cgroup` names it.
        group: String,
        /// The directory read instead.
        instead: PathBuf,
    },
    /// The budget is above what the machine allows, and so is not the limit.
    BudgetAboveLimit {
        /// The budget.
        budget_bytes: u64,
        /// The machine's limit.
        limit_bytes: u64,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Unreadable { path, reason } => write!(f, "{}: {reason}", path.display()),
            Notice::Garbled { path, field: "", found } => {
                write!(f, "{} should be a number of bytes, found {found:?}", path.display())
            }
            Notice::Garbled { path, field, found } => {
                let path = path.display();
                write!(f, "{path}: `{field}` should come with a number of bytes, found {found:?}")
            }
            Notice::NoSuchGroup { group, instead } => {
                write!(f, "control group {group} is not visible, read {}", instead.display())
            }
            Notice::BudgetAboveLimit { budget_bytes, limit_bytes } => write!(
                f,
                "a budget of {budget_bytes} bytes is above the machine's limit of {limit_bytes}"
            ),
        }
    }
}

/// The limits found. The plain fields sum up `bounds`; `None` is no limit, or none that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The machine's memory.
    pub host_bytes: Option<u64>,
    /// The lowest limit of the process's control group and those above it.
    pub cgroup_bytes: Option<u64>,
    /// The lower of the process's two soft limits.
    pub rlimit_bytes: Option<u64>,
    /// Bytes used under the lowest limit.
    pub usage_bytes: u64,
    /// Of those, bytes that the kernel gives up without cost.
    pub reclaimable_bytes: u64,
    /// Every limit, the widest first: host, groups from the mount's root down, rlimits, budget.
    pub bounds: Vec<Bound>,
    /// What could not be read.
    pub notices: Vec<Notice>,
}

/// Reads the limits of this process below `root`: `/`, or a tree of copies in a test.
///
/// Opens about ten files of `proc` and `sys/fs/cgroup`, and reads at most 64 KiB of each.
pub fn limits(root: &Path) -> Limits {
    let mut reader = read::Reader::new(root);
    let mut bounds: Vec<Bound> = host(&mut reader).into_iter().collect();
    bounds.extend(cgroup::bounds(&mut reader));
    bounds.extend(rlimits(&mut reader));
    let mut limits = Limits { bounds, notices: reader.notices, ..Limits::default() };
    limits.sum_up();
    limits
}

impl Limits {
    /// These limits and the user's: a budget, of which `live_bytes` are spent. It is the limit if
    /// it is the lowest, and a notice if it is not.
    #[must_use]
    pub fn with_budget(mut self, budget_bytes: u64, live_bytes: u64) -> Limits {
        if let Some(limit_bytes) = self.limit_bytes().filter(|limit| *limit < budget_bytes) {
            self.notices.push(Notice::BudgetAboveLimit { budget_bytes, limit_bytes });
        }
        self.bounds.push(Bound {
            source: Source::Budget,
            limit_bytes: budget_bytes,
            usage_bytes: live_bytes,
            reclaimable_bytes: 0,
        });
        self.sum_up();
        self
    }

    /// The lowest limit; `None` where none was found, as on a system without `proc`.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.lowest().map(|bound| bound.limit_bytes)
    }

    /// The bound with the lowest limit; of equals the widest.
    pub fn lowest(&self) -> Option<&Bound> {
        self.bounds.iter().min_by_key(|bound| bound.limit_bytes)
    }

    /// Bytes that the process may still take: the lowest headroom, which need not be that of the
    /// lowest limit. `None` where no limit was found.
    pub fn headroom_bytes(&self) -> Option<u64> {
        self.bounds.iter().map(Bound::headroom_bytes).min()
    }

    fn sum_up(&mut self) {
        let lowest_of = |wanted: fn(&Source) -> bool| {
            let bounds = self.bounds.iter().filter(|bound| wanted(&bound.source));
            bounds.map(|bound| bound.limit_bytes).min()
        };
        self.host_bytes = lowest_of(|source| *source == Source::Host);
        self.cgroup_bytes = lowest_of(|source| matches!(source, Source::Cgroup(_)));
        self.rlimit_bytes =
            lowest_of(|source| matches!(source, Source::AddressSpace | Source::DataSize));
        let used = self.lowest().map(|bound| (bound.usage_bytes, bound.reclaimable_bytes));
        (self.usage_bytes, self.reclaimable_bytes) = used.unwrap_or_default();
    }
}

fn host(reader: &mut read::Reader<'_>) -> Option<Bound> {
    let path = Path::new("proc/meminfo");
    let text = reader.text(path)?;
    let limit_bytes = reader.kb_field(path, &text, "MemTotal:")?;
    // Without these two nothing is known to be used.
    let free_bytes = reader.kb_field(path, &text, "MemFree:").unwrap_or(limit_bytes);
    let available_bytes = reader.kb_field(path, &text, "MemAvailable:").unwrap_or(free_bytes);
    Some(Bound {
        source: Source::Host,
        limit_bytes,
        usage_bytes: limit_bytes.saturating_sub(free_bytes),
        reclaimable_bytes: available_bytes.saturating_sub(free_bytes),
    })
}

fn rlimits(reader: &mut read::Reader<'_>) -> Vec<Bound> {
    let path = Path::new("proc/self/limits");
    let Some(text) = reader.text(path) else { return Vec::new() };
    let rows = [
        ("Max address space", Source::AddressSpace, "VmSize:"),
        ("Max data size", Source::DataSize, "VmData:"),
    ];
    let mut bounds = Vec::new();
    for (row, source, usage_field) in rows {
        let Some(limit_bytes) = reader.soft_limit(path, &text, row) else { continue };
        let path = Path::new("proc/self/status");
        let usage_bytes = reader
            .text(path)
            .and_then(|text| reader.kb_field(path, &text, usage_field))
            .unwrap_or_default();
        bounds.push(Bound { source, limit_bytes, usage_bytes, reclaimable_bytes: 0 });
    }
    bounds
}
