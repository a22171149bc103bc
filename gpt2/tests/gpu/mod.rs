//! What training on CUDA finds where there is no GPU: the stand-ins of `comm-nccl`'s tests, and of NVIDIA's compiler.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]
#![allow(dead_code, unreachable_pub, reason = "every test program takes what it needs")]

#[path = "../../../comm-nccl/tests/gpu/mod.rs"]
mod stand_in;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use stand_in::Gpus;

/// What the trainer looks for before it lets the backend compile a kernel.
const HEADERS: [&str; 7] =
    ["cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h", "cooperative_groups.h", "nv/target", "cccl/cuda/barrier"];

/// A source of this folder.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu").join(name)
}

/// GPUs whose kernels the processor runs.
pub struct Machine {
    gpus: Gpus,
}

impl Machine {
    /// `None`, with the reason printed, if there is no C++ compiler.
    pub fn new() -> Option<Self> {
        let gpus = Gpus::new()?.with_both_names();
        gpus.library("libnvrtc.so", &source("compiler.cpp"), &[]);
        for header in HEADERS {
            let path = gpus.path().join("include").join(header);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        Some(Machine { gpus })
    }

    /// `gpt2`, in a folder of its own, for at most ten minutes. Kernels are compiled once for all machines.
    pub fn gpt2(&self, devices: usize, when: &str) -> Command {
        let kernels = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-kernels");
        fs::create_dir_all(&kernels).unwrap();
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", "600", env!("CARGO_BIN_EXE_gpt2")]);
        self.gpus.equip(&mut command, devices, when);
        command
            .current_dir(self.gpus.path())
            .env("CUDA_PATH", self.gpus.path())
            .env("XDG_CACHE_HOME", self.gpus.path().join("cache"))
            .env("STAND_IN_KERNELS", kernels)
            .env("STAND_IN_HEADER", source("kernel.hpp"))
            // More than any kernel of the smallest model has.
            .env("STAND_IN_MOST_BLOCKS", "900");
        command
    }

    pub fn path(&self) -> &Path {
        self.gpus.path()
    }
}
