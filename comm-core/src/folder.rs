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
        if let (Some(_), Some(boot)) = (&lock, boot()) {
            fs::write(folder.path().join(MARKER), &boot)?;
            remove_left_behind(folder.path(), prefix, &boot);
        }
        Ok(PrivateFolder { folder, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// The file in a folder that says on which start of which machine a process of ours made it: another machine that has the same folder need
/// not see its lock, and what has no such file is somebody else's.
const MARKER: &str = ".isocomm-folder";

fn boot() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()
}

/// Removes the neighbours of `own` that begin with `prefix`, were made by this module since `boot`, are of the same user, and locked by
/// nobody. What cannot be removed stays.
fn remove_left_behind(own: &Path, prefix: &str, boot: &str) {
    let Some(neighbours) = own.parent().and_then(|parent| fs::read_dir(parent).ok()) else { return };
    let Ok(user) = fs::metadata(own).map(|metadata| metadata.uid()) else { return };
    for neighbour in neighbours.flatten() {
        if !neighbour.file_name().to_string_lossy().starts_with(prefix) || neighbour.path() == own {
            continue;
        }
        // Not of what a symbolic link leads to.
        let is_old = |metadata: &Metadata| {
            let age = metadata.modified().ok().and_then(|time| time.elapsed().ok());
            let is_private = metadata.uid() == user && metadata.mode() & 0o777 == 0o700;
            metadata.is_dir() && is_private && age.is_some_and(|age| age > SETTLED)
        };
        let is_ours = || fs::read_to_string(neighbour.path().join(MARKER)).is_ok_and(|of| of == boot);
        if !neighbour.metadata().is_ok_and(|metadata| is_old(&metadata)) || !is_ours() {
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
        let make = |age: u64, of: Option<&str>| {
            let mode = Permissions::from_mode(0o700);
            let folder = tempfile::Builder::new().prefix(&prefix).permissions(mode).tempdir().unwrap().keep();
            fs::write(folder.join("address"), "left").unwrap();
            of.iter().for_each(|of| fs::write(folder.join(MARKER), of).unwrap());
            File::open(&folder).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
            folder
        };
        let here = boot().unwrap();
        let (left, young, used) = (make(120, Some(&here)), make(0, Some(&here)), make(120, Some(&here)));
        let (of_a_user, of_another_machine) = (make(120, None), make(120, Some("another boot")));
        let lock = File::open(&used).unwrap();
        lock.try_lock().unwrap();
        let link = std::env::temp_dir().join(format!("{prefix}link"));
        std::os::unix::fs::symlink(std::env::temp_dir(), &link).unwrap();

        let one = PrivateFolder::new(&prefix).unwrap();
        assert_eq!(fs::metadata(one.path()).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(!left.exists() && young.exists() && used.exists() && link.exists());
        assert!(of_a_user.exists() && of_another_machine.exists());
        // The first one lives, however old it is.
        File::open(one.path()).unwrap().set_modified(SystemTime::now() - 2 * SETTLED).unwrap();
        let two = PrivateFolder::new(&prefix).unwrap();
        assert!(one.path().exists());
        let path = one.path().to_path_buf();
        drop((one, two));
        assert!(!path.exists());
        drop(lock);
        [young, used, of_a_user, of_another_machine].into_iter().for_each(|folder| fs::remove_dir_all(folder).unwrap());
        fs::remove_file(link).unwrap();
    }
}
