//! What CUDA needs: the driver, the compiler of kernels (NVRTC) and the headers that kernels include, each looked for where the backend
//! will look.

use std::path::{Path, PathBuf};

use super::{CudaHeaders, Problem};

/// What generated kernels include, and for Python's packages, which split a toolkit up, one header of each that those need in turn.
const HEADERS: [&str; 7] =
    ["cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h", "cooperative_groups.h", "nv/target", "cuda/barrier"];

/// Where the backend has the compiler look for headers, below a toolkit.
const INCLUDES: [&str; 2] = ["include", "include/cccl"];

/// Where Python's packages of CUDA 13 put a toolkit, below `site-packages`. Those of CUDA 12 have a folder for each part, of which
/// `CUDA_PATH` could name only one.
const TOOLKIT_IN_PACKAGES: [&str; 1] = ["nvidia/cu13"];

/// Where they put NVRTC.
const NVRTC_IN_PACKAGES: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

/// Folders in which parts of a toolkit may lie. What the backend searches is [`toolkit`](ToolkitPaths::toolkit) alone; the others serve for
/// advice.
#[derive(Clone, Debug, Default)]
pub(super) struct ToolkitPaths {
    /// The toolkit that the backend will take, and what made it so.
    pub(super) toolkit: Option<PathBuf>,
    /// Whether `CUDA_PATH` named it.
    pub(super) by_variable: bool,
    /// Folders of Python packages.
    pub(super) packages: Vec<PathBuf>,
}

impl ToolkitPaths {
    /// Those of this process.
    #[cfg(feature = "cuda")]
    pub(super) fn here() -> Self {
        ToolkitPaths {
            toolkit: cubecl_cuda::install::cuda_path(),
            by_variable: crate::env::cuda_path().is_some(),
            packages: crate::env::python_roots().iter().flat_map(|root| package_folders(root)).collect(),
        }
    }

    /// The headers.
    ///
    /// # Errors
    /// What is missing, with the toolkit among the Python packages that would help, if there is one.
    pub(super) fn headers(&self) -> Result<CudaHeaders, Problem> {
        let Some(toolkit) = &self.toolkit else {
            return Err(Problem::new(
                "no CUDA headers: CUDA_PATH is not set, and there is no /usr/local/cuda, /opt/cuda or /usr/bin/nvcc",
                self.advice_on_headers(),
            ));
        };
        match missing_header(toolkit) {
            None => Ok(CudaHeaders { path: toolkit.join("include") }),
            Some(header) => {
                let named = if self.by_variable { "that CUDA_PATH names" } else { "that was found first" };
                Err(Problem::new(
                    format!(
                        "CUDA headers are missing: {header} is not in {}/include, the toolkit {named}",
                        toolkit.display()
                    ),
                    self.advice_on_headers(),
                ))
            }
        }
    }

    fn advice_on_headers(&self) -> String {
        match self.in_packages(&TOOLKIT_IN_PACKAGES).find(|toolkit| missing_header(toolkit).is_none()) {
            Some(toolkit) => format!("set CUDA_PATH={}, which has them", toolkit.display()),
            None => "install the CUDA toolkit of NVRTC's version, or for CUDA 13 `pip install nvidia-cuda-runtime nvidia-cuda-crt \
                     nvidia-cuda-cccl`, and set CUDA_PATH to its folder (`nvidia/cu13` below site-packages)"
                .into(),
        }
    }

    /// What to say where the loader finds NVRTC under none of `names`.
    pub(super) fn no_nvrtc(&self, names: &[String]) -> Problem {
        let is_nvrtc = |folder: &PathBuf| {
            std::fs::read_dir(folder).is_ok_and(|entries| {
                entries.flatten().any(|entry| names.iter().any(|name| entry.file_name() == name.as_str()))
            })
        };
        let of_toolkit = self.toolkit.iter().flat_map(|toolkit| ["lib64", "lib"].map(|below| toolkit.join(below)));
        let folders: Vec<PathBuf> = of_toolkit.chain(self.in_packages(&NVRTC_IN_PACKAGES)).collect();
        let remedy = match folders.iter().find(|folder| is_nvrtc(folder)) {
            Some(folder) => format!("set LD_LIBRARY_PATH={}, which has it", folder.display()),
            None => match folders.iter().find_map(|folder| unknown_nvrtc(folder)) {
                // Python's packages hold it under its full name alone.
                Some(library) => format!(
                    "make a link `libnvrtc.so` to {} in a folder that LD_LIBRARY_PATH names, beside that library's own folder",
                    library.display()
                ),
                None => format!(
                    "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc-cu12` and set LD_LIBRARY_PATH to its folder \
                     (`{}` below site-packages)",
                    NVRTC_IN_PACKAGES[1]
                ),
            },
        };
        Problem::new(
            format!(
                "NVRTC, which compiles the kernels, is missing: the loader finds none of {}",
                crate::sys::listed(names)
            ),
            remedy,
        )
    }

    fn in_packages<'a>(&'a self, below: &'a [&str]) -> impl Iterator<Item = PathBuf> + 'a {
        self.packages.iter().flat_map(move |packages| below.iter().map(|below| packages.join(below)))
    }
}

/// An NVRTC in `folder` under a name that the loader is not asked for.
fn unknown_nvrtc(folder: &Path) -> Option<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.into_iter().find(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.strip_prefix("libnvrtc.so.")
            .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
    })
}

/// The first header that the compiler would not find.
fn missing_header(toolkit: &Path) -> Option<&'static str> {
    let there = |header: &&str| INCLUDES.iter().any(|folder| toolkit.join(folder).join(header).is_file());
    HEADERS.into_iter().find(|header| !there(header))
}

/// The folders of Python packages below `root`.
pub(super) fn package_folders(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(root.join("lib")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .flat_map(|entry| ["site-packages", "dist-packages"].map(|name| entry.path().join(name)))
        .filter(|folder| folder.is_dir())
        .collect();
    found.sort();
    found
}

/// What an NVRTC newer than the driver leads to: the driver refuses what it compiles, because each CUDA has its own version of PTX; only
/// those of 12.5 and 12.6 are the same. `None` if the driver is new enough. Versions are (major, minor).
fn too_new(nvrtc: (u32, u32), driver: (u32, u32)) -> Option<Problem> {
    let ptx = |version| if version == (12, 6) { (12, 5) } else { version };
    (ptx(nvrtc) > ptx(driver)).then(|| {
        Problem::new(
            format!(
                "NVRTC is of CUDA {}.{}, but the driver supports at most CUDA {}.{}",
                nvrtc.0, nvrtc.1, driver.0, driver.1
            ),
            format!(
                "update the driver, or install the CUDA toolkit {}.{} and put its `lib64` first in LD_LIBRARY_PATH",
                driver.0, driver.1
            ),
        )
    })
}

/// What an NVRTC older than the oldest that the kernels are written for leads to: some of them do not compile.
fn too_old(nvrtc: (u32, u32)) -> Option<Problem> {
    const OLDEST: (u32, u32) = (12, 8);
    (nvrtc < OLDEST).then(|| {
        Problem::new(
            format!("NVRTC is of CUDA {}.{}, and kernels need {}.{} or newer", nvrtc.0, nvrtc.1, OLDEST.0, OLDEST.1),
            "install a newer CUDA toolkit, but not a newer one than the driver supports (`nvidia-smi` shows the version)",
        )
    })
}

/// Whether an NVRTC of this version compiles what the driver, as far as its version is known, takes.
///
/// # Errors
/// What does not fit.
pub(super) fn fits(nvrtc: (u32, u32), driver: Option<(u32, u32)>) -> Result<(), Problem> {
    let problem = too_old(nvrtc).or_else(|| driver.and_then(|driver| too_new(nvrtc, driver)));
    problem.map_or(Ok(()), Err)
}

/// Looks for everything that the device with this number will need. Gives its number and NVRTC's version.
///
/// # Errors
/// What is missing.
#[cfg(feature = "cuda")]
pub(super) fn probe(number: Option<usize>) -> Result<(usize, (u32, u32)), Problem> {
    let driver = driver()?;
    let devices = devices(&driver)?;
    let in_turn = || comm_core::job::rank_on_this_machine().unwrap_or(0) % devices.len().max(1);
    let number = number.unwrap_or_else(in_turn);
    if number >= devices.len() {
        return Err(super::out_of_range(number, devices.len(), "CUDA device"));
    }
    let nvrtc = nvrtc()?;
    fits(nvrtc.version, driver.version().ok())?;
    ToolkitPaths::here().headers()?;
    driver.try_out(number).map_err(|(why, remedy)| Problem::new(why, remedy))?;
    Ok((number, nvrtc.version))
}

/// The driver, initialised.
///
/// # Errors
/// That it is not installed, or what it answers.
#[cfg(feature = "cuda")]
pub(super) fn driver() -> Result<crate::sys::CudaDriver, Problem> {
    crate::sys::CudaDriver::load().map_err(|why| {
        Problem::new(why, "install or update the NVIDIA driver (`nvidia-smi` shows it), or use --device cpu")
    })
}

/// The devices that the driver shows, at least one.
#[cfg(feature = "cuda")]
pub(super) fn devices(driver: &crate::sys::CudaDriver) -> Result<Vec<crate::sys::CudaDevice>, Problem> {
    let devices = driver
        .devices()
        .map_err(|why| Problem::new(why, "check whether `nvidia-smi` lists the GPU, or use --device cpu"))?;
    if devices.is_empty() {
        return Err(Problem::new(
            "the NVIDIA driver shows no device",
            "check the list of `nvidia-smi` and the variable CUDA_VISIBLE_DEVICES, which can hide devices, or use --device cpu",
        ));
    }
    Ok(devices)
}

/// NVRTC, under the first name by which the loader finds it.
///
/// # Errors
/// Which names were tried.
#[cfg(feature = "cuda")]
pub(super) fn nvrtc() -> Result<crate::sys::Nvrtc, Problem> {
    let names = crate::sys::nvrtc_names();
    match crate::sys::Nvrtc::find(&names) {
        Some(Ok(nvrtc)) => Ok(nvrtc),
        Some(Err(why)) => Err(Problem::new(why, "install NVRTC again")),
        None => Err(ToolkitPaths::here().no_nvrtc(&names)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn toolkit(at: &Path) {
        for header in HEADERS {
            let path = at.join(if header == "cuda/barrier" { "include/cccl" } else { "include" }).join(header);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
    }

    #[test]
    fn headers_are_found_in_the_toolkit() {
        let folder = tempfile::tempdir().unwrap();
        toolkit(folder.path());
        let places = ToolkitPaths { toolkit: Some(folder.path().into()), ..ToolkitPaths::default() };
        assert_eq!(places.headers().unwrap().path, folder.path().join("include"));
    }

    #[test]
    fn without_a_toolkit_every_place_searched_is_named() {
        let said = ToolkitPaths::default().headers().unwrap_err().to_string();
        for part in ["CUDA_PATH", "/usr/local/cuda", "/opt/cuda", "/usr/bin/nvcc", "pip install"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }

    #[test]
    fn one_missing_header_is_named_with_who_chose_the_toolkit() {
        let folder = tempfile::tempdir().unwrap();
        toolkit(folder.path());
        fs::remove_file(folder.path().join("include/crt/mma.h")).unwrap();
        let places = ToolkitPaths { toolkit: Some(folder.path().into()), by_variable: true, packages: Vec::new() };
        let said = places.headers().unwrap_err().to_string();
        assert!(said.contains("crt/mma.h is not in") && said.contains("that CUDA_PATH names"), "{said}");
    }

    #[test]
    fn a_toolkit_among_python_packages_is_advised() {
        let root = tempfile::tempdir().unwrap();
        let packages = root.path().join("lib/python3.12/site-packages");
        toolkit(&packages.join("nvidia/cu13"));
        let found = package_folders(root.path());
        assert_eq!(found, std::slice::from_ref(&packages));
        let said = ToolkitPaths { packages: found, ..ToolkitPaths::default() }.headers().unwrap_err().to_string();
        let advice = format!("set CUDA_PATH={}", packages.join("nvidia/cu13").display());
        assert!(said.contains(&advice), "{said}");
    }

    #[test]
    fn nvrtc_outside_the_loaders_search_is_advised() {
        let root = tempfile::tempdir().unwrap();
        let names = ["libnvrtc.so".to_string(), "libnvrtc.so.12".to_string()];
        let packages = root.path().join("lib/python3.12/site-packages");
        let lib = packages.join("nvidia/cu13/lib");
        fs::create_dir_all(&lib).unwrap();
        let places = ToolkitPaths { packages: vec![packages], ..ToolkitPaths::default() };
        let said = places.no_nvrtc(&names).to_string();
        assert!(
            said.contains("libnvrtc.so, libnvrtc.so.12") && said.contains("pip install nvidia-cuda-nvrtc"),
            "{said}"
        );
        // One that the loader would not find by its name.
        fs::write(lib.join("libnvrtc.so.13"), "").unwrap();
        let said = places.no_nvrtc(&names).to_string();
        assert!(said.contains(&format!("a link `libnvrtc.so` to {}", lib.join("libnvrtc.so.13").display())), "{said}");
        fs::write(lib.join("libnvrtc.so.12"), "").unwrap();
        let said = places.no_nvrtc(&names).to_string();
        assert!(said.contains(&format!("set LD_LIBRARY_PATH={}", lib.display())), "{said}");
        // That of a toolkit comes first.
        let toolkit = root.path().join("cuda");
        fs::create_dir_all(toolkit.join("lib64")).unwrap();
        fs::write(toolkit.join("lib64/libnvrtc.so"), "").unwrap();
        let said = ToolkitPaths { toolkit: Some(toolkit.clone()), ..places }.no_nvrtc(&names).to_string();
        assert!(said.contains(&format!("{}/lib64", toolkit.display())), "{said}");
    }

    #[test]
    fn a_compiler_newer_than_the_driver_or_too_old_is_refused() {
        for (nvrtc, driver) in [((12, 8), (12, 8)), ((12, 9), (13, 0)), ((13, 0), (13, 1))] {
            assert_eq!(fits(nvrtc, Some(driver)), Ok(()));
        }
        assert_eq!(fits((13, 0), None), Ok(()));
        // The same PTX.
        assert_eq!(too_new((12, 6), (12, 5)), None);
        let said = fits((13, 1), Some((13, 0))).unwrap_err().to_string();
        assert!(said.contains("CUDA 13.1") && said.contains("toolkit 13.0"), "{said}");
        let said = fits((13, 0), Some((12, 4))).unwrap_err().to_string();
        assert!(said.contains("CUDA 13.0") && said.contains("at most CUDA 12.4"), "{said}");
        let said = fits((12, 4), Some((13, 0))).unwrap_err().to_string();
        assert!(said.contains("CUDA 12.4") && said.contains("12.8 or newer"), "{said}");
    }
}
