//! `gpt2 devices`, and what `--device` says where something is missing.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::{Command, Output};

/// Runs the program where no graphics driver, toolkit or environment of Python's is found but those in `variables`.
fn gpt2(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    for variable in ["COMM_RANK", "COMM_WORLD_SIZE", "RANK", "WORLD_SIZE", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_PATH"] {
        command.env_remove(variable);
    }
    command
        .args(arguments)
        .current_dir(folder.path())
        // Without it the graphics library grumbles on standard error.
        .env("XDG_RUNTIME_DIR", folder.path())
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// Expects failure with one line, and returns it.
fn refused(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let output = gpt2(arguments, variables);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} was accepted");
    assert!(said.starts_with("error: ") && said.trim_end().lines().count() == 1, "{arguments:?}: {said}");
    said
}

/// Of a machine without any adapter.
const NO_ADAPTERS: [(&str, &str); 2] =
    [("VK_ICD_FILENAMES", "/nowhere/icd.json"), ("__EGL_VENDOR_LIBRARY_FILENAMES", "/nowhere/egl.json")];

#[test]
fn devices_are_listed_in_words() {
    let output = gpt2(&["devices"], &NO_ADAPTERS);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    for part in ["build ", "cpu ", "wgpu", "cuda", "nvrtc", "headers", "nccl", "kernels"] {
        assert!(said.lines().any(|line| line.starts_with(part)), "{part}: {said}");
    }
    for feature in ["wgpu", "cuda", "nccl"] {
        let lacking =
            said.contains(&format!("missing: this build lacks the feature `{feature}`; build with --features"));
        let has =
            [("wgpu", cfg!(feature = "wgpu")), ("cuda", cfg!(feature = "cuda")), ("nccl", cfg!(feature = "nccl"))];
        assert_eq!(lacking, !has.iter().any(|(name, has)| *name == feature && *has), "{feature}: {said}");
    }
}

#[test]
fn devices_are_listed_in_json() {
    let output = gpt2(&["devices", "--json"], &NO_ADAPTERS);
    assert!(output.status.success());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(json["cpu"]["cores"].as_u64().unwrap() >= 1);
    assert_eq!(json["features"]["cuda"], cfg!(feature = "cuda"));
    for part in ["wgpu", "cuda", "nvrtc", "cuda_headers", "nccl", "kernel_cache"] {
        let fields = json[part].as_object().unwrap();
        let missing = |field: &str| fields["missing"][field].as_str().is_some_and(|text| !text.is_empty());
        assert!(fields.contains_key("found") || missing("why") && missing("remedy"), "{part}: {json}");
    }
}

#[test]
fn names_that_are_no_devices_are_refused_with_those_that_are() {
    for command in ["train", "sample"] {
        for name in ["gpu", "cpu:1", "cuda:x", "wgpu:-1"] {
            let output = gpt2(&[command, "--device", name], &[]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains(&format!("unknown device '{name}'")), "{said}");
            assert!(said.contains("cuda:N") && said.contains("`gpt2 devices`"), "{said}");
        }
    }
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_build_without_cuda_says_so() {
    for name in ["cuda", "cuda:3"] {
        let said = refused(&["train", "--device", name], &[]);
        let expected =
            format!("error: --device {name}: this build lacks the feature `cuda`; build with --features cuda");
        assert!(said.starts_with(&expected), "{said}");
    }
}

#[test]
#[cfg(not(feature = "wgpu"))]
fn a_build_without_wgpu_says_so() {
    let said = refused(&["train", "--device", "wgpu"], &[]);
    assert!(said.contains("this build lacks the feature `wgpu`; build with --features wgpu"), "{said}");
}

#[test]
#[cfg(feature = "wgpu")]
fn a_machine_without_adapters_is_one_clear_line() {
    let said = refused(&["train", "--device", "wgpu"], &NO_ADAPTERS);
    assert!(said.contains("--device wgpu: no adapter") && said.contains("mesa-vulkan-drivers"), "{said}");
}

#[test]
#[cfg(feature = "wgpu")]
fn an_adapter_out_of_range_is_one_clear_line() {
    let said = refused(&["train", "--device", "wgpu:63"], &[]);
    assert!(
        said.contains("--device wgpu:63: no ") && (said.contains("number 63") || said.contains("adapter")),
        "{said}"
    );
}

/// A driver and a compiler of kernels that only answer questions, in place of NVIDIA's.
#[cfg(feature = "cuda")]
mod stand_in {
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use super::{gpt2, refused};

    const DRIVER: &str = r#"
        #include <stdio.h>
        int cuInit(unsigned flags) { return INIT; }
        int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
        int cuDeviceGetCount(int *count) { *count = 2; return 0; }
        int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
        int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Stand-in %d", device); return 0; }
        int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80ull << 30; return 0; }
        int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
        int cuGetErrorString(int code, const char **text) { *text = "no device is detected"; return 0; }
    "#;

    const NVRTC: &str = "int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = 8; return 0; }";

    fn library(folder: &Path, name: &str, source: &str, define: &str) {
        let file = folder.join("source.c");
        fs::write(&file, source).unwrap();
        let path = folder.join(name);
        let status = Command::new("cc").args(["-shared", "-fPIC", define, "-o"]).arg(path).arg(&file).status().unwrap();
        assert!(status.success());
    }

    #[test]
    fn the_devices_of_the_driver_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        library(folder.path(), "libcuda.so", DRIVER, "-DINIT=0");
        library(folder.path(), "libnvrtc.so", NVRTC, "-DMAJOR=12");
        let path = folder.path().to_str().unwrap();
        let output = gpt2(&["devices", "--json"], &[("LD_LIBRARY_PATH", path)]);
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let cuda = &json["cuda"]["found"];
        assert_eq!(cuda["driver_version"], "12.8");
        assert_eq!(cuda["devices"].as_array().unwrap().len(), 2);
        assert_eq!(cuda["devices"][1]["name"], "Stand-in 1");
        assert_eq!(cuda["devices"][1]["memory_bytes"], 80_u64 << 30);
        assert_eq!(cuda["devices"][1]["compute_capability"], "9.0");
        assert_eq!(json["nvrtc"]["found"]["version"], "12.8");
        let said = refused(&["train", "--device", "cuda:2"], &[("LD_LIBRARY_PATH", path)]);
        assert!(
            said.contains("--device cuda:2: no CUDA device has the number 2: this machine has 2 CUDA devices"),
            "{said}"
        );
    }

    #[test]
    fn each_missing_part_is_one_clear_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let train = |parts: &[&str]| {
            let said = refused(
                &["train", "--device", "cuda"],
                &[("LD_LIBRARY_PATH", path), ("CUDA_PATH", "/nowhere/cuda"), ("HOME", "/nowhere")],
            );
            for part in parts {
                assert!(said.contains(part), "{part}: {said}");
            }
        };
        library(folder.path(), "libcuda.so", DRIVER, "-DINIT=100");
        train(&["cuInit fails: no device is detected (CUDA error 100)", "nvidia-smi"]);
        library(folder.path(), "libcuda.so", DRIVER, "-DINIT=0");
        library(folder.path(), "libnvrtc.so", NVRTC, "-DMAJOR=13");
        train(&["NVRTC is of CUDA 13.8", "at most CUDA 12.8"]);
        library(folder.path(), "libnvrtc.so", NVRTC, "-DMAJOR=12");
        train(&["cuda_fp16.h is not in /nowhere/cuda/include", "that CUDA_PATH names"]);
        library(folder.path(), "libnvrtc.so", "int nothing;", "-DMAJOR=12");
        train(&["libnvrtc.so is not NVRTC"]);
    }
}
