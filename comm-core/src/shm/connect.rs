//! How ranks find each other's memory.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use super::ShmOptions;
use super::exchange::Shared;
use super::layout::{Layout, PROOF_LEN};
use super::sys::{MEMORY_NAME, Segment};
use crate::control::Control;
use crate::deadline::Deadline;
use crate::descriptors;
use crate::error::{Error, Result};
use crate::waiting::Waiting;

/// What a rank tells the others: where it is, and where its memory is.
#[derive(Serialize, Deserialize)]
struct Announcement {
    lanes: usize,
    ring_bytes: usize,
    parks: bool,
    place: Place,
    process: u32,
    descriptor: i32,
    device: u64,
    inode: u64,
    nonce: [u8; PROOF_LEN],
}

/// Two ranks can reach each other's memory if these are equal.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    /// Of this run of the kernel.
    boot: String,
    /// The processes that see each other's numbers.
    pid_namespace: (u64, u64),
}

/// What a rank says or why it cannot: every rank takes part in every gather, so that none waits for one that gave up.
type Said<T> = std::result::Result<T, String>;

/// Makes this rank's memory, opens that of all others, and returns once every rank has done so. From then on the memory belongs to
/// the ranks alone and goes with the last of them.
pub(super) fn connect(control: &dyn Control, options: &ShmOptions, deadline: Deadline) -> Result<Shared> {
    let (rank, ranks) = (control.rank(), control.world_size());
    let key = control.derive_key("shared memory");
    // Settings that make no sense here may make sense elsewhere: the others must learn of them too.
    let layout = Layout::new(ranks, options.lanes, options.ring_bytes);
    let mine = layout.clone().map_err(|error| error.to_string()).and_then(|layout| create(rank, layout, options, &key));
    let (mine, said) = match mine {
        Ok((segment, file, announcement)) => (Some((segment, file)), Ok(announcement)),
        Err(why) => (None, Err(why)),
    };
    let said: Vec<Said<Announcement>> = gather(control, "shared memory: made", &said, deadline)?;
    let layout = layout?;
    let announced = all_of(said, "shared memory")?;

    let parks = announced.iter().map(|theirs| theirs.parks).collect();
    check_settings(&announced)?;
    let opened: Said<Vec<Arc<Segment>>> = announced
        .iter()
        .enumerate()
        .filter(|(peer, _)| *peer != rank)
        .map(|(peer, theirs)| {
            open(theirs, &announced[rank].place, layout, &proof(&key, peer, &theirs.nonce))
                .map(Arc::new)
                .map_err(|why| format!("rank {rank} cannot use the memory of rank {peer}: {why}"))
        })
        .collect();
    let told: Said<()> = opened.as_ref().map(drop).map_err(Clone::clone);
    let told = gather(control, "shared memory: opened", &told, deadline)?;
    all_of(told, "shared memory between all ranks")?;
    let (Ok(mut segments), Some((own, _file))) = (opened, mine) else {
        return Err(Error::Internal("shared memory that is there and is not".into()));
    };
    segments.insert(rank, Arc::new(own));
    Ok(Shared { rank, waiting: options.waiting, segments, parks })
}

fn create(rank: usize, layout: Layout, options: &ShmOptions, key: &[u8; 32]) -> Said<(Segment, File, Announcement)> {
    let place = Place::here()?;
    let make = || {
        let (segment, file) = Segment::create(layout)?;
        let metadata = file.metadata()?;
        Ok((segment, file, metadata))
    };
    let (segment, file, metadata) = make().map_err(|error: std::io::Error| {
        format!("rank {rank} cannot have {} B of memory to share: {}", layout.total(), descriptors::explain(&error))
    })?;
    let mut nonce = [0; PROOF_LEN];
    getrandom::fill(&mut nonce).map_err(|error| format!("rank {rank} has no randomness: {error}"))?;
    segment.write_proof(&proof(key, rank, &nonce));
    let announcement = Announcement {
        lanes: options.lanes,
        ring_bytes: options.ring_bytes,
        parks: options.waiting != Waiting::Busy,
        place,
        process: std::process::id(),
        descriptor: std::os::fd::AsRawFd::as_raw_fd(&file),
        device: metadata.dev(),
        inode: metadata.ino(),
        nonce,
    };
    Ok((segment, file, announcement))
}

fn open(theirs: &Announcement, here: &Place, layout: Layout, proof: &[u8; PROOF_LEN]) -> Said<Segment> {
    if theirs.place.boot != here.boot {
        return Err("it runs on another machine; choose a transport that crosses machines, like tcp or quic".into());
    }
    if theirs.place.pid_namespace != here.pid_namespace {
        return Err("it runs in another PID namespace, as in another container; start all ranks in the same one".into());
    }
    let path = format!("/proc/{}/fd/{}", theirs.process, theirs.descriptor);
    let unreachable = |error: std::io::Error| match descriptors::ran_out(&error) {
        true => format!("{path}: {}", descriptors::explain(&error)),
        false => format!("{path}: {error}; the ranks must run as the same user and see each other in /proc"),
    };
    // Opening something else, a device for instance, could have consequences of its own.
    let name = fs::read_link(&path).map_err(unreachable)?;
    if !name.to_string_lossy().starts_with(&format!("/memfd:{MEMORY_NAME}")) {
        return Err(format!("{path} is {} and no shared memory", name.display()));
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(&path)
        .map_err(unreachable)?;
    let metadata = file.metadata().map_err(unreachable)?;
    if (metadata.dev(), metadata.ino()) != (theirs.device, theirs.inode) {
        return Err(format!("{path} is another file than the one that was announced"));
    }
    let segment = Segment::open(&file, layout).map_err(|error| format!("mapping {} B: {error}", layout.total()))?;
    if !bool::from(segment.proof().ct_eq(proof)) {
        return Err(format!("{path} does not belong to this job"));
    }
    Ok(segment)
}

impl Place {
    fn here() -> Said<Place> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|error| format!("/proc is needed to share memory: boot_id: {error}"))?;
        // Where /proc shows another namespace than this process is in, its numbers mean other processes.
        let shown = fs::read_link("/proc/self").map_err(|error| format!("/proc is needed to share memory: {error}"))?;
        if shown != Path::new(&std::process::id().to_string()) {
            return Err("/proc shows the processes of another PID namespace".into());
        }
        let namespace =
            fs::metadata("/proc/self/ns/pid").map_err(|error| format!("this process's PID namespace: {error}"))?;
        Ok(Place { boot: boot.trim().into(), pid_namespace: (namespace.dev(), namespace.ino()) })
    }
}

/// What the memory of `rank` begins with: nobody outside the job can know it.
fn proof(key: &[u8; 32], rank: usize, nonce: &[u8; PROOF_LEN]) -> [u8; PROOF_LEN] {
    // HMAC takes keys of any length, so this cannot fail; if it did, no proof would match.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return [0; PROOF_LEN] };
    mac.update(&(rank as u64).to_le_bytes());
    mac.update(nonce);
    mac.finalize().into_bytes().into()
}

/// All ranks see the same announcements, so all come to the same answer.
fn check_settings(announced: &[Announcement]) -> Result<()> {
    let Some(first) = announced.first() else { return Ok(()) };
    let differs = |theirs: &Announcement| (theirs.lanes, theirs.ring_bytes) != (first.lanes, first.ring_bytes);
    match announced.iter().position(differs) {
        None => Ok(()),
        Some(rank) => Err(Error::Rendezvous(format!(
            "shared memory: rank {rank} has {} lanes and rings of {} B, but rank 0 has {} lanes and rings of {} B; all ranks must use the \
             same",
            announced[rank].lanes, announced[rank].ring_bytes, first.lanes, first.ring_bytes
        ))),
    }
}

/// What all ranks said, or the reasons of those that could not.
fn all_of<T>(said: Vec<Said<T>>, what: &str) -> Result<Vec<T>> {
    let mut good = Vec::with_capacity(said.len());
    let mut reasons = Vec::new();
    for said in said {
        match said {
            Ok(value) => good.push(value),
            Err(why) => reasons.push(why),
        }
    }
    match reasons.len() {
        0 => Ok(good),
        // The first few say it all.
        _ => {
            reasons.truncate(3);
            Err(Error::Unsupported { what: what.into(), why: reasons.join("; ") })
        }
    }
}

fn gather<T: Serialize + DeserializeOwned>(
    control: &dyn Control,
    label: &str,
    mine: &T,
    deadline: Deadline,
) -> Result<Vec<T>> {
    let blob = postcard::to_stdvec(mine).map_err(|error| Error::Internal(format!("{label}: {error}")))?;
    let blobs = control.all_gather(label, &blob, deadline)?;
    let decode = |(rank, blob): (usize, &Vec<u8>)| {
        decode(blob).map_err(|why| Error::Protocol { who: format!("rank {rank}"), what: format!("{label}: {why}") })
    };
    blobs.iter().enumerate().map(decode).collect()
}

fn decode<T: DeserializeOwned>(blob: &[u8]) -> Said<T> {
    match postcard::take_from_bytes(blob) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(format!("{} bytes after its end", rest.len())),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_after_an_announcement_are_noticed() {
        let said: Said<u32> = Ok(300);
        let mut blob = postcard::to_stdvec(&said).unwrap();
        assert_eq!(decode::<Said<u32>>(&blob), Ok(said));
        blob.push(0);
        assert!(decode::<Said<u32>>(&blob).unwrap_err().contains("1 bytes"));
    }
}
