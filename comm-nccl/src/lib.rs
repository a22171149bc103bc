//! NCCL for `comm-core`, found at run time.
//!
//! [`NcclCommunicator`] runs every collective by NCCL, on buffers in the memory of a GPU ([`CudaBuffer`]) or, through a copy there, in
//! host memory. Nothing here links to NCCL or CUDA: both are loaded at run time, and their absence is an ordinary error
//! that says where they were searched.
//!
//! Ranks meet over the job's control plane ([`comm_core::Control`]), which also reports a rank that was lost. NCCL's own connections are
//! neither encrypted nor authenticated beyond its unique id (see [`comm_core::threat_model`]).

mod communicator;
mod connect;
mod engine;
mod lane;
mod options;
mod plan;
mod sys;

use std::path::PathBuf;

use comm_core::{DType, Error};

pub use communicator::{DEVICE_FACT, NcclCommunicator};
pub use options::NcclOptions;
#[cfg(feature = "stand-in")]
pub use sys::Behaviour;
pub use sys::{CudaBuffer, Device, Library, SHARE_VARIABLE, share_gpu};

/// Names a path to NCCL's library, which is then the only one tried.
pub const LIBRARY_VARIABLE: &str = "COMM_NCCL_LIB";

/// Whether a communicator on NCCL can be made here: there is a library, a driver and a GPU.
///
/// # Errors
/// `Unsupported`, with the reason.
pub fn available() -> Result<(), Error> {
    Library::load()?;
    if sys::Driver::load()?.device_count()? == 0 {
        return Err(unsupported(
            "the CUDA driver sees no device; look at CUDA_VISIBLE_DEVICES and `nvidia-smi`".into(),
        ));
    }
    Ok(())
}

/// Where the library is looked for, in order: `override_path` alone if given, else the loader's own search under both of its names,
/// then the folders of a Python installation's `nvidia/nccl/lib` below `python_roots`.
pub fn candidates(override_path: Option<PathBuf>, python_roots: &[PathBuf]) -> Vec<PathBuf> {
    if let Some(path) = override_path {
        return vec![path];
    }
    let mut all = vec![PathBuf::from("libnccl.so.2"), PathBuf::from("libnccl.so")];
    all.extend(python_roots.iter().map(|root| root.join("nvidia/nccl/lib/libnccl.so.2")));
    all
}

fn unsupported(why: String) -> Error {
    Error::Unsupported { what: "NCCL".into(), why }
}

/// A reduction of a type that NCCL does not have.
fn no_such_type(dtype: DType) -> Error {
    Error::Unsupported {
        what: format!("a reduction of {dtype} by NCCL"),
        why: "it has no 16-bit integers; use i32 or u32, or another transport".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_is_the_only_candidate() {
        assert_eq!(candidates(Some("/x/libnccl.so".into()), &["/y".into()]), [PathBuf::from("/x/libnccl.so")]);
    }

    #[test]
    fn the_names_of_the_library_and_of_the_wheel_are_tried() {
        let all = candidates(None, &["/site-packages".into()]);
        assert!(all.contains(&PathBuf::from("libnccl.so.2")));
        assert!(all.contains(&PathBuf::from("/site-packages/nvidia/nccl/lib/libnccl.so.2")));
    }

    #[test]
    fn what_is_not_there_is_an_error_that_names_the_path() {
        let error = Library::open(&[PathBuf::from("/nowhere/libnccl.so.2")]).unwrap_err().to_string();
        assert!(error.contains("/nowhere/libnccl.so.2"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        let error = Library::open(&[PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")]).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }));
    }
}
