//! Folders for sockets and addresses of a running process.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

/// A new folder in the system's temporary one that only this user can enter. It is removed when this is dropped, and one that a process has
/// left because it was killed when another process makes one with the same prefix.
#[derive(Debug)]
pub struct PrivateFolder {
    folder: tempfile::TempDir,
    /// Held as long as this process lives, however it ends.
    _lock: Option<File>,
}

/// A folder that is younger may not have been locked yet.
const SETTLED: Duration = Duration::from_secs(60);

impl PrivateFolder {
    /// A folder whose name begins with `prefix`, which should be of one kind of program alone.
    ///
    /// # Errors
    /// That of the system, when the folder cannot be made.
    pub fn new(prefix: &str) -> io::Result<Self> {
        Self::new_in(&std::env::temp_dir(), prefix)
    }

    /// As [`new`](PrivateFolder::new), in the folder `parent`.
    ///
    /// # Errors
    /// Those of [`new`](PrivateFolder::new).
    pub fn new_in(parent: &Path, prefix: &str) -> io::Result<Self> {
        let mode = Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix(prefix).permissions(mode).tempdir_in(parent)?;
        // Where folders cannot be locked, nobody takes this one for left behind either.
        let lock = File::open(&folder).ok().filter(|lock| lock.try_lock().is_ok());
        if lock.is_some() {
            remove_left_behind(folder.path(), prefix);
        }
        Ok(PrivateFolder { folder, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes the neighbours of `own` that begin with `prefix`, are of the same user, and locked by nobody. What cannot be removed stays.
fn remove_left_behind(own: &Path, prefix: &str) {
    let Some(neighbours) = own.parent().and_then(|parent| fs::read_dir(parent).ok()) else { return };
    let Ok(user) = fs::metadata(own).map(|metadata| metadata.uid()) else { return };
    for neighbour in neighbours.flatten() {
        if !neighbour.file_name().to_string_lossy().starts_with(prefix) || neighbour.path() == own {
            continue;
        }
        // Not of what a symbolic link leads to.
        let is_old = |metadata: &Metadata| {
            let age = metadata.modified().ok().and_then(|time| time.elapsed().ok());
            metadata.is_dir() && metadata.uid() == user && age.is_some_and(|age| age > SETTLED)
        };
        if !neighbour.metadata().is_ok_and(|metadata| is_old(&metadata)) {
            continue;
        }
        let Ok(lock) = File::open(neighbour.path()) else { continue };
        if lock.try_lock().is_ok() {
            let _ = fs::remove_dir_all(neighbour.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_a_killed_process_has_left_is_removed_and_nothing_else() {
        // A prefix of this test's own, in the folder of everybody.
        let prefix = format!("comm-test-{}-", std::process::id());
        let make = |age: u64| {
            let folder = tempfile::Builder::new().prefix(&prefix).tempdir().unwrap().keep();
            fs::write(folder.join("address"), "left").unwrap();
            File::open(&folder).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
            folder
        };
        let (left, young, used) = (make(120), make(0), make(120));
        let lock = File::open(&used).unwrap();
        lock.try_lock().unwrap();
        let link = std::env::temp_dir().join(format!("{prefix}link"));
        std::os::unix::fs::symlink(std::env::temp_dir(), &link).unwrap();

        let one = PrivateFolder::new(&prefix).unwrap();
        assert_eq!(fs::metadata(one.path()).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(!left.exists() && young.exists() && used.exists() && link.exists());
        // The first one lives, however old it is.
        File::open(one.path()).unwrap().set_modified(SystemTime::now() - 2 * SETTLED).unwrap();
        let two = PrivateFolder::new(&prefix).unwrap();
        assert!(one.path().exists());
        let path = one.path().to_path_buf();
        drop((one, two));
        assert!(!path.exists());
        drop(lock);
        fs::remove_dir_all(young).unwrap();
        fs::remove_dir_all(used).unwrap();
        fs::remove_file(link).unwrap();
    }
}
