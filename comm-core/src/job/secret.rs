//! What the ranks of a job trust each other by.

use std::fmt;
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::hex;
use crate::small_file::read_small;

/// The secret that authenticates the ranks of a job. Its text form does not show it.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Fewest bytes of a secret: a peer that is not one of ours gets to see what an off-line guess can be checked against, so
    /// it must not be guessable.
    pub const MIN_LEN: usize = 16;

    const MAX_LEN: usize = 4096;

    /// A secret of the given bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there are fewer than [`MIN_LEN`](Secret::MIN_LEN).
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() < Self::MIN_LEN || bytes.len() > Self::MAX_LEN {
            return Err(Error::invalid(format!(
                "a secret needs {} to {} bytes, this one has {}; use for example 32 random bytes in hexadecimal",
                Self::MIN_LEN,
                Self::MAX_LEN,
                bytes.len()
            )));
        }
        Ok(Secret(bytes))
    }

    /// 64 random hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no randomness.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        fill_random(&mut bytes)?;
        Ok(Secret(hex(&bytes).into_bytes()))
    }

    /// Reads a secret from a file; white space around it is not part of it. Never waits, whatever is there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the file belongs to another user than this one and root (unless this one is root), when others than
    /// the owner may read it, when it is not a regular file, or when what it holds is no text of fitting length; [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self> {
        // Owner and mode are looked at in the file that was opened, not in one that has taken its place since.
        let (bytes, metadata) = read_small(path, Self::MAX_LEN as u64, "the secret's file")?;
        let (owner, user, mode) = (metadata.uid(), rustix::process::geteuid().as_raw(), metadata.mode());
        if !is_trusted(owner, user) {
            return Err(refused_owner(path, owner, user));
        }
        if mode & 0o077 != 0 {
            return Err(Error::invalid(format!(
                "{} can be read by other users (mode {:o}), so it is not secret: set its mode with chmod 600",
                path.display(),
                mode & 0o777
            )));
        }
        let text = str::from_utf8(&bytes).ok().map(str::trim_ascii);
        let Some(text) = text.filter(|text| !text.chars().any(char::is_control)) else {
            return Err(Error::invalid(format!(
                "the secret in {} is not a line of text; use for example 32 random bytes in hexadecimal",
                path.display()
            )));
        };
        Self::new(text).map_err(|error| Error::invalid(format!("{}: {error}", path.display())))
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Makes a file with a random secret at `path`, in folders that only this user can enter, unless there is one. Of several processes that do so
/// at once, on machines that share the folder too, one makes it, and the others find it.
///
/// # Errors
/// [`Error::Io`] with what else a user can do.
pub(super) fn make(path: &Path) -> Result<()> {
    let failed = |e: io::Error| {
        let what = format!(
            "making the secret by which this user's jobs authenticate their ranks, {} (set COMM_SECRET_FILE to a file with one instead)",
            path.display()
        );
        Error::io(what, e)
    };
    if path.exists() {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    // Mode 600, and a name that no other process has.
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    let secret = Secret::random()?;
    file.write_all(secret.bytes()).and_then(|()| file.write_all(b"\n")).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    // A link never replaces what is there, on network file systems neither.
    match fs::hard_link(file.path(), path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(failed(e)),
        _ => wait_for(path).map_err(failed),
    }
}

/// Until a file that is there on another machine is seen here, where the system may remember that it was not.
fn wait_for(path: &Path) -> io::Result<()> {
    let deadline = Deadline::after(Duration::from_secs(10));
    loop {
        match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && !deadline.has_passed() => {
                thread::sleep(Duration::from_millis(50));
            }
            other => return other.map(drop),
        }
    }
}

/// Whether a process of `user` trusts a file of `owner` to be secret. Root can read every file, and reads the one that it is given.
fn is_trusted(owner: u32, user: u32) -> bool {
    owner == user || owner == 0 || user == 0
}

fn refused_owner(path: &Path, owner: u32, user: u32) -> Error {
    Error::invalid(format!(
        "{} belongs to user {owner}, who can read it, and this process runs as user {user}: name a file that belongs to user {user} or to \
         root, or change its owner with chown",
        path.display()
    ))
}

/// Fills `bytes` with randomness of the system.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|e| Error::io("getting random bytes", io::Error::other(e.to_string())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("chmod 600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let secret = Secret::read(&path).unwrap();
        assert_eq!(secret.bytes(), b"0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        assert!(Secret::read(&dir.path().join("none")).unwrap_err().to_string().contains("none"));
    }

    #[test]
    fn a_secret_is_made_once_however_many_make_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config/isocomm/secret");
        let secrets: Vec<Vec<u8>> = thread::scope(|scope| {
            let made = || {
                make(&path).unwrap();
                Secret::read(&path).unwrap().bytes().to_vec()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(made)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0] && secret.len() == 64));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let folder = path.parent().unwrap();
        assert_eq!((mode(&path), mode(folder)), (0o600, 0o700));
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "nothing else is left there");
        // What is there stays, whatever it is.
        fs::write(&path, "0123456789abcdef").unwrap();
        make(&path).unwrap();
        assert_eq!(Secret::read(&path).unwrap().bytes(), b"0123456789abcdef");
        let error = make(&path.join("below/secret")).unwrap_err().to_string();
        assert!(error.contains("COMM_SECRET_FILE"), "{error}");
    }

    #[test]
    fn a_secret_file_of_another_user_is_refused() {
        assert!(is_trusted(1000, 1000) && is_trusted(0, 1000) && is_trusted(1000, 0));
        assert!(!is_trusted(1000, 1001));
        let (error, path) = (refused_owner(Path::new("/there/secret"), 1000, 1001).to_string(), "/there/secret");
        assert!(error.contains("belongs to user 1000") && error.contains(path), "{error}");
    }

    #[test]
    fn a_secret_file_of_any_other_kind_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let file = |name: &str, bytes: &[u8]| {
            fs::write(path(name), bytes).unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(0o600)).unwrap();
            path(name)
        };
        assert!(std::process::Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        std::os::unix::fs::symlink(path("nothing"), path("dangling")).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        let start = std::time::Instant::now();
        for (path, what) in [
            (path("fifo"), "is a FIFO"),
            (dir.path().to_path_buf(), "is a directory"),
            ("/dev/zero".into(), "is a device"),
            ("/dev/null".into(), "is a device"),
            (path("socket"), "No such device"),
            (path("dangling"), "No such file"),
            (file("empty", b""), "has 0"),
            (file("blank", b" \n\n"), "has 0"),
            (file("short", b"short\n"), "has 5"),
            (file("huge", &vec![b'a'; 1 << 20]), "has 1048576 bytes"),
            (file("binary", &[0xff; 32]), "is not a line of text"),
            (file("two lines", b"0123456789abcdef\n0123456789abcdef"), "is not a line of text"),
        ] {
            let error = Secret::read(&path).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains(&path.display().to_string()), "{what}: {error}");
        }
        assert!(start.elapsed() < std::time::Duration::from_secs(20), "it waited for something");
        drop(socket);
        // What makes a file unreadable does not stop root.
        let closed = file("closed", b"0123456789abcdef");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        if let Err(error) = Secret::read(&closed) {
            assert!(error.to_string().contains("Permission denied"), "{error}");
        }
    }
}
