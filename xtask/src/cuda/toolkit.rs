//! A CUDA toolkit: the system's, or one made of Python wheels.

use anyhow::{Context, Result, ensure};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What candle's build asks of a toolkit. 13.0 is the newest that its bindings know.
const WHEELS: [&str; 8] = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cublas==13.0.*",
    "nvidia-cuda-nvrtc==13.0.*",
    "nvidia-curand",
];

/// Names by which builds look for a toolkit.
const HOMES: [&str; 4] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"];

pub(super) struct Toolkit {
    pub(super) root: PathBuf,
    /// Made of wheels: its version is known, there may be no GPU to ask for its capability, and its
    /// driver's library is empty.
    pub(super) is_ours: bool,
}

impl Toolkit {
    /// The one that the environment names, or one below `target`, installed once.
    /// # Errors
    /// If it is incomplete or cannot be installed.
    pub(super) fn get(target: &Path, python: &str) -> Result<Self> {
        for name in HOMES {
            if let Some(root) = env::var_os(name) {
                let root = PathBuf::from(root);
                let nvcc = root.join("bin/nvcc");
                ensure!(nvcc.is_file(), "{name} is set, but there is no `{}`", nvcc.display());
                return Ok(Self { root, is_ours: false });
            }
        }
        let folder = target.join("cuda-toolkit");
        let root = folder.join("nvidia").join("cu13");
        let done = folder.join("complete");
        if !done.is_file() {
            install(python, &folder)?;
            complete(&root)?;
            fs::write(&done, WHEELS.join("\n"))?;
        }
        Ok(Self { root, is_ours: true })
    }

    /// What a build needs in its environment.
    pub(super) fn env(&self) -> Result<Vec<(String, String)>> {
        let root = self.root.display().to_string();
        let mut all: Vec<(String, String)> =
            HOMES.iter().map(|name| ((*name).to_string(), root.clone())).collect();
        for (name, folder) in [("PATH", "bin"), ("LIBRARY_PATH", "lib"), ("LD_LIBRARY_PATH", "lib")]
        {
            let before = env::var_os(name).unwrap_or_default();
            let folders = [self.root.join(folder)].into_iter().chain(env::split_paths(&before));
            let folders = env::join_paths(folders.filter(|f| !f.as_os_str().is_empty()))?;
            all.push((name.to_string(), folders.to_string_lossy().into_owned()));
        }
        if self.is_ours {
            all.push(("CUDARC_CUDA_VERSION".to_string(), "13000".to_string()));
            if env::var_os("CUDA_COMPUTE_CAP").is_none() {
                all.push(("CUDA_COMPUTE_CAP".to_string(), "90".to_string()));
            }
        }
        Ok(all)
    }
}

fn install(python: &str, folder: &Path) -> Result<()> {
    println!("installing {} into {}", WHEELS.join(" "), folder.display());
    let status = Command::new(python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"])
        .arg(folder)
        .args(WHEELS)
        .status()
        .with_context(|| format!("starting `{python}`"))?;
    ensure!(status.success(), "`{python} -m pip install`: {status}");
    Ok(())
}

/// Gives the wheels the layout of a toolkit: `lib64`, names without versions, a driver to link to.
fn complete(root: &Path) -> Result<()> {
    let lib = root.join("lib");
    let entries = fs::read_dir(&lib).with_context(|| lib.display().to_string())?;
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some((stem, _)) = name.split_once(".so.") {
            link(&name, &lib.join(format!("{stem}.so")))?;
        }
    }
    link("lib", &root.join("lib64"))?;
    let driver = lib.join("libcuda.so");
    if !driver.exists() {
        let source = lib.join("driver.c");
        fs::write(&source, "/* Stands for the driver's library where there is none. */\n")?;
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&driver).arg(&source);
        let status = cc.status().context("starting `cc`")?;
        ensure!(status.success(), "cc: {status}");
    }
    Ok(())
}

#[cfg(unix)]
fn link(to: &str, at: &Path) -> Result<()> {
    if at.symlink_metadata().is_ok() {
        return Ok(());
    }
    std::os::unix::fs::symlink(to, at).with_context(|| at.display().to_string())
}

#[cfg(not(unix))]
fn link(_: &str, at: &Path) -> Result<()> {
    anyhow::bail!("{}: a toolkit of wheels needs links; set CUDA_HOME", at.display())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn wheels_get_the_layout_of_a_toolkit() {
        let root = env::temp_dir().join(format!("xtask-toolkit-{}", std::process::id()));
        let lib = root.join("lib");
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("libx.so.13"), "x").unwrap();
        fs::write(lib.join("libcuda.so"), "driver").unwrap();
        // Twice: an interrupted installation goes on.
        complete(&root).unwrap();
        complete(&root).unwrap();
        assert_eq!(fs::read_to_string(root.join("lib64/libx.so")).unwrap(), "x");
        let toolkit = Toolkit { root: root.clone(), is_ours: true };
        let vars = toolkit.env().unwrap();
        let var = |name: &str| vars.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
        assert_eq!(var("CUDA_HOME"), root.to_str());
        assert!(var("PATH").unwrap().starts_with(root.join("bin").to_str().unwrap()));
        assert_eq!(var("CUDARC_CUDA_VERSION"), Some("13000"));
        fs::remove_dir_all(&root).unwrap();
    }
}
