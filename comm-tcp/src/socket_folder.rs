//! A folder of Unix sockets that only this user may enter, and how ranks of one machine find each other's.

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use comm_core::control::ControlExt;
use comm_core::folder::PrivateFolder;
use comm_core::{Control, Deadline, Error, Result};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use crate::auth::Edge;
use crate::socket::{self, SocketFacts};

/// The kernel's number of this start of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What is not available where ranks cannot reach each other's sockets.
const IPC: &str = "ZeroMQ over Unix sockets between all ranks";

/// A fresh folder for Unix sockets that only this user may enter, removed with this value.
pub(crate) struct SocketFolder {
    folder: PrivateFolder,
}

impl SocketFolder {
    /// Below the system's folder for temporary files.
    pub(crate) fn create(rank: usize) -> Result<Self> {
        let folder = PrivateFolder::new("comm-ipc-")
            .map_err(|error| Error::io(format!("rank {rank}: making a private directory for Unix sockets"), error))?;
        Ok(SocketFolder { folder })
    }

    /// A listener for one connection, and where it is.
    pub(crate) fn listen(&self, rank: usize, edge: Edge) -> Result<(UnixListener, PathBuf)> {
        let path = self.folder.path().join(socket_name(edge));
        match UnixListener::bind(&path) {
            Ok(listener) => Ok((listener, path)),
            // What is left of the reasons for this kind: the name has no zero byte.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Err(Error::Unsupported {
                what: format!("rank {rank}: the Unix socket {}", path.display()),
                why: format!(
                    "a path of {} B is too long for the address of a socket; set TMPDIR to a folder with a shorter path",
                    path.as_os_str().len()
                ),
            }),
            Err(error) => {
                Err(Error::io(format!("rank {rank}: listening on the Unix socket {}", path.display()), error))
            }
        }
    }

    /// What the other ranks need to find and check the folder.
    pub(crate) fn announce(&self, rank: usize) -> Result<FolderInfo> {
        let unsupported = |why: String| Error::Unsupported { what: format!("rank {rank}: ZeroMQ over IPC"), why };
        let path = self.folder.path();
        let spelled = path.to_str().filter(|path| !path.chars().any(char::is_control)).ok_or_else(|| {
            unsupported(format!(
                "the path {} is not plain text, so it cannot be sent to the other ranks; set TMPDIR to another folder",
                path.display()
            ))
        })?;
        let machine = fs::read_to_string(BOOT_ID)
            .map_err(|error| unsupported(format!("{BOOT_ID} is needed to tell machines apart: {error}")))?;
        let (device, inode) = identity(path).map_err(|error| unsupported(format!("{spelled}: {error}")))?;
        Ok(FolderInfo { machine: machine.trim().to_string(), device, inode, path: spelled.to_string() })
    }
}

/// Where a rank's folder of sockets is, and what identifies it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FolderInfo {
    /// The boot id of its machine.
    pub(crate) machine: String,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) path: String,
}

impl FolderInfo {
    /// Where it has the socket for a connection.
    pub(crate) fn socket(&self, edge: Edge) -> PathBuf {
        Path::new(&self.path).join(socket_name(edge))
    }

    /// Why the rank of the folder `own` cannot reach this one's sockets; `None` if it can.
    fn is_out_of_reach(&self, own: &FolderInfo) -> Option<String> {
        if self.machine != own.machine {
            return Some(
                "it runs on another machine; choose a transport that connects machines, such as tcp or quic".into(),
            );
        }
        let path = Path::new(&self.path);
        if !path.is_absolute() {
            return Some(format!("{} is not an absolute path", path.display()));
        }
        match identity(path) {
            Ok(found) if found == (self.device, self.inode) => None,
            Ok(_) => Some(format!("{} is another folder on that rank, which may run in another container", self.path)),
            Err(error) => Some(format!("{}: {error}; start all ranks in the same container", self.path)),
        }
    }
}

/// Returns once every rank has seen the folders of all others, which are `folders` in order; fails on all ranks alike if one
/// has not.
pub(crate) fn check_all_reachable(
    rank: usize,
    folders: &[&FolderInfo],
    control: &dyn Control,
    deadline: Deadline,
) -> Result<()> {
    let Some(own) = folders.get(rank) else { return Err(Error::Internal("a rank without a folder".into())) };
    let complaint = folders.iter().enumerate().find_map(|(peer, folder)| {
        let why = folder.is_out_of_reach(own)?;
        Some(format!("rank {rank} cannot reach the sockets of rank {peer}: {why}"))
    });
    let seen = complaint.map_or(Ok(()), |why| Err(Error::Unsupported { what: IPC.into(), why }));
    // No rank removes its folder before all have looked.
    control.gather_all("ipc folders seen", IPC, seen, deadline).map(drop)
}

/// Asks for the same buffers as on TCP for all sockets of this process that are connected within `folders`, and says what the
/// kernel granted. `zeromq` keeps its sockets to itself, so they are found among this process's own; where the system does not
/// allow that they keep the kernel's default, and this says so.
pub(crate) fn enlarge_buffers(folders: &[&FolderInfo]) -> String {
    let folders: HashSet<&Path> = folders.iter().map(|folder| Path::new(&folder.path)).collect();
    let own = match pidfd_open(getpid(), PidfdFlags::empty()) {
        Ok(own) => own,
        Err(error) => return format!("the kernel's default (no larger ones: pidfd_open: {error})"),
    };
    let numbers = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten().filter_map(|entry| {
        let is_socket = fs::read_link(entry.path()).is_ok_and(|name| name.to_string_lossy().starts_with("socket:"));
        entry.file_name().to_str().filter(|_| is_socket)?.parse().ok()
    });
    let (mut granted, mut refused) = (None, None);
    for number in numbers.collect::<Vec<i32>>() {
        // A copy of the descriptor: whoever closes the first one meanwhile does no harm.
        let copy = match pidfd_getfd(&own, number, PidfdGetfdFlags::empty()) {
            Ok(copy) => copy,
            Err(error) => {
                refused.get_or_insert(error);
                continue;
            }
        };
        let socket = SockRef::from(&copy);
        let is_ours = [socket.local_addr(), socket.peer_addr()]
            .into_iter()
            .flatten()
            .any(|address| address.as_pathname().and_then(Path::parent).is_some_and(|folder| folders.contains(folder)));
        if is_ours {
            socket::enlarge_buffers(&socket);
            granted = Some(SocketFacts::read(&copy).buffers);
        }
    }
    match (granted, refused) {
        (Some(granted), _) => granted,
        (None, Some(error)) => format!("the kernel's default (no larger ones: pidfd_getfd: {error})"),
        (None, None) => "none: no connections".into(),
    }
}

/// What the socket for a connection is called in its listener's folder.
fn socket_name(edge: Edge) -> String {
    format!("{}-{}", edge.dialler, edge.lane)
}

/// What identifies a folder on one machine, whatever its path.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    let metadata = fs::metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    const EDGE: Edge = Edge { dialler: 3, listener: 0, lane: 1 };

    #[test]
    fn only_this_user_may_enter_the_folder_and_it_goes_with_its_value() {
        let socket_folder = SocketFolder::create(0).unwrap();
        let folder = socket_folder.announce(0).unwrap();
        let mode = fs::metadata(&folder.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let (_listener, path) = socket_folder.listen(0, EDGE).unwrap();
        assert_eq!(folder.socket(EDGE), path);
        UnixStream::connect(&path).unwrap();
        drop(socket_folder);
        assert!(!Path::new(&folder.path).exists());
    }

    #[test]
    fn a_path_that_is_too_long_is_an_error_that_says_what_to_do() {
        let base = tempfile::tempdir().unwrap();
        let socket_folder = SocketFolder { folder: PrivateFolder::new_in(base.path(), &"x".repeat(100)).unwrap() };
        let error = socket_folder.listen(0, EDGE).unwrap_err().to_string();
        assert!(error.contains("TMPDIR") && error.contains("B is too long"), "{error}");
    }

    #[test]
    fn a_path_that_is_no_line_of_text_is_not_told() {
        let base = tempfile::tempdir().unwrap();
        let socket_folder = SocketFolder { folder: PrivateFolder::new_in(base.path(), "a\nb").unwrap() };
        let error = socket_folder.announce(0).unwrap_err().to_string();
        assert!(error.contains("TMPDIR"), "{error}");
    }

    #[test]
    fn other_machines_and_other_containers_are_out_of_reach() {
        let (here, there) = (SocketFolder::create(0).unwrap(), SocketFolder::create(1).unwrap());
        let (own, theirs) = (here.announce(0).unwrap(), there.announce(1).unwrap());
        assert_eq!(theirs.is_out_of_reach(&own), None);
        let cases = [
            (FolderInfo { machine: "another".into(), ..theirs.clone() }, "another machine"),
            (FolderInfo { inode: own.inode, ..theirs.clone() }, "another folder on that rank"),
            (FolderInfo { path: theirs.path[1..].to_string(), ..theirs.clone() }, "not an absolute path"),
            (FolderInfo { path: format!("{}-gone", theirs.path), ..theirs }, "No such file"),
        ];
        for (folder, word) in cases {
            let why = folder.is_out_of_reach(&own).unwrap();
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn what_one_rank_cannot_reach_fails_all_ranks_alike() {
        let socket_folders = [0, 1, 2].map(|rank| SocketFolder::create(rank).unwrap());
        let mut folders = [0, 1, 2].map(|rank| socket_folders[rank].announce(rank).unwrap());
        let check_all_reachable = |folders: &[FolderInfo; 3]| -> Vec<Result<()>> {
            let folders: Vec<&FolderInfo> = folders.iter().collect();
            let ranks = comm_core::local::group(3, 1);
            std::thread::scope(|scope| {
                let look = |control: &dyn Control| {
                    check_all_reachable(control.rank(), &folders, control, Deadline::after(Duration::from_secs(30)))
                };
                let looks: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || look(&*rank.control))).collect();
                looks.into_iter().map(|look| look.join().unwrap()).collect()
            })
        };
        assert!(check_all_reachable(&folders).iter().all(Result::is_ok));
        folders[2].machine = "another".into();
        let said: Vec<String> =
            check_all_reachable(&folders).into_iter().map(|seen| seen.unwrap_err().to_string()).collect();
        assert!(said[0].contains("rank 0 cannot reach the sockets of rank 2: it runs on another machine"), "{said:?}");
        assert!(said.iter().all(|text| *text == said[0]));
    }

    #[test]
    fn the_buffers_of_sockets_that_others_keep_are_found() {
        let socket_folder = SocketFolder::create(0).unwrap();
        let (listener, path) = socket_folder.listen(0, EDGE).unwrap();
        let dialler = UnixStream::connect(path).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let default = SockRef::from(&UnixStream::pair().unwrap().0).send_buffer_size().unwrap();
        let said = enlarge_buffers(&[&socket_folder.announce(0).unwrap()]);
        if said.contains("default") {
            println!("skipped: {said}");
            return;
        }
        for stream in [&dialler, &accepted] {
            assert!(SockRef::from(stream).send_buffer_size().unwrap() > default, "{said}");
        }
        assert_eq!(said, SocketFacts::read(&accepted).buffers);
    }
}
