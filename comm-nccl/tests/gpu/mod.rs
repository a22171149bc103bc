//! GPUs that are not there: stand-ins for the CUDA driver and NCCL as shared libraries, made of the C++ beside this file by the compiler of
//! the machine. They compute on the processor, each process for itself, and exchange messages as files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Where a machine without a C++ compiler must not pass over a test.
const NEEDED: &str = "TEST_NEEDS_CXX";

/// A folder with libraries that a process finds in place of the real ones.
pub struct Gpus {
    folder: TempDir,
    compiler: OsString,
}

impl Gpus {
    /// `None`, with the reason printed, if there is no C++ compiler.
    pub fn new() -> Option<Self> {
        // A variable with arguments names no program.
        let named = std::env::var_os("CXX").into_iter().chain([OsString::from("c++")]);
        let works = |compiler: &OsString| Command::new(compiler).arg("--version").output().is_ok();
        let Some(compiler) = named.into_iter().find(works) else {
            assert!(std::env::var_os(NEEDED).is_none(), "there is no C++ compiler");
            println!("skipped: no C++ compiler");
            return None;
        };
        // Where the test itself was built, programs may be loaded from; that need not be so of the system's temporary folder.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
        let gpus = Gpus { folder, compiler };
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../comm-nccl/tests/gpu");
        gpus.library("libcuda.so", &sources.join("driver.cpp"), &["-lpthread", "-ldl"]);
        let driver = gpus.path().join("libcuda.so");
        gpus.library("libnccl.so.2", &sources.join("nccl.cpp"), &[driver.to_str().expect("a path in Unicode")]);
        std::fs::create_dir(gpus.path().join("messages")).expect("a folder of one's own");
        Some(gpus)
    }

    /// Has the driver found under its other name, too, which some ask for first. NVIDIA's compiler would ask it for what it does not have.
    pub fn with_both_names(self) -> Self {
        std::os::unix::fs::symlink("libcuda.so", self.path().join("libcuda.so.1")).expect("a name that is free");
        self
    }

    /// The folder, which goes with this.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Compiles a stand-in under the name of what it stands in for.
    pub fn library(&self, name: &str, source: &Path, more: &[&str]) -> PathBuf {
        let library = self.path().join(name);
        let output = Command::new(&self.compiler)
            // Its name of its own is what others that need it are looked for by, in place of a path.
            .args(["-std=c++17", "-shared", "-fPIC", "-O1", "-fwrapv", &format!("-Wl,-soname,{name}"), "-o"])
            .args([&library, source])
            .args(more)
            .output()
            .expect("the compiler that said its version");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        library
    }

    /// Has `command` find `devices` GPUs. `when` says when they do what they are told: `at-once`, or as `late` as can be (driver.cpp).
    pub fn equip(&self, command: &mut Command, devices: usize, when: &str) {
        // What the compiler's own library may need comes after ours.
        let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let places = std::iter::once(self.path().to_owned()).chain(std::env::split_paths(&others));
        command
            .env("LD_LIBRARY_PATH", std::env::join_paths(places).expect("paths that were in such a list"))
            .env("CXX", &self.compiler)
            .env("COMM_NCCL_LIB", self.path().join("libnccl.so.2"))
            .env("STAND_IN_COMPUTES", when)
            .env("STAND_IN_DEVICES", devices.to_string())
            .env("STAND_IN_NCCL", self.path().join("messages"));
    }
}
