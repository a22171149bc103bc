//! NCCL for `comm-core`, found at run time.
//!
//! Nothing here links to NCCL or CUDA: the library is looked up when it is asked for, and its absence is an ordinary error that
//! says where it was searched. So far this crate finds the library and reads its version; it offers no communicator yet, which
//! [`available`] says too.

mod sys;

use std::path::PathBuf;

use comm_core::Error;

pub use sys::Library;

/// Names a path to NCCL's library, which is then the only one tried.
pub const LIBRARY_VARIABLE: &str = "COMM_NCCL_LIB";

/// Whether a communicator on NCCL can be made here.
///
/// # Errors
/// `Unsupported`, with the reason.
pub fn available() -> Result<(), Error> {
    let library = Library::load()?;
    Err(unsupported(format!(
        "NCCL {} was found at {}, but this version has no communicator on it yet; use tcp, tcp-raw or quic",
        library.version_text(),
        library.path().display()
    )))
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
