//! Small files that others may have put there.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{Error, Result};

/// Reads a file of at most `most` bytes that should be an ordinary one. Never waits, whatever is there: a FIFO, a device.
///
/// # Errors
/// [`Error::InvalidArgument`] when it is something else or has more bytes, [`Error::Io`].
pub(crate) fn read_small_file(path: &Path, most: u64, what: &str) -> Result<Vec<u8>> {
    read_small(path, most, what).map(|(bytes, _)| bytes)
}

/// The bytes, and what the system says of the file.
pub(crate) fn read_small(path: &Path, most: u64, what: &str) -> Result<(Vec<u8>, fs::Metadata)> {
    let failed = |e| Error::io(format!("reading {what}, {}", path.display()), e);
    let no_blocking = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = fs::OpenOptions::new().read(true).custom_flags(no_blocking).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        let kind = metadata.file_type();
        let kind = match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () => "a device",
        };
        return Err(Error::invalid(format!("{what}, {}, is {kind}; name a regular file", path.display())));
    }
    let mut bytes = Vec::new();
    // A file may grow, and not all tell their length.
    file.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        let size = metadata.len().max(most + 1);
        return Err(Error::invalid(format!("{what}, {}, has {size} bytes; at most {most} fit", path.display())));
    }
    Ok((bytes, metadata))
}
