//! How ranks find each other's memory.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use super::ShmOptions;
use super::exchange::TransportState;
use super::layout::{Layout, PROOF_LEN};
use super::single_copy::{MemoryInfo, PeerMemory, SingleCopy, Token};
use super::sys::{MEMORY_NAME, Segment};
use crate::control::{Control, ControlExt, RankResult};
use crate::deadline::Deadline;
use crate::descriptors;
use crate::error::{Error, Result};
use crate::waiting::Waiting;

/// What a rank tells the others: where it is, and where its memory is.
#[derive(Clone, Serialize, Deserialize)]
struct PeerInfo {
    lanes: usize,
    ring_bytes: usize,
    parks: bool,
    machine: MachineId,
    process: u32,
    descriptor: i32,
    device: u64,
    inode: u64,
    nonce: [u8; PROOF_LEN],
    /// Where the others may try to read this rank's memory; none if it does not want that.
    memory: Option<MemoryInfo>,
}

/// Two ranks can reach each other's memory if these are equal.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct MachineId {
    /// Of this run of the kernel.
    boot: String,
    /// The processes that see each other's numbers.
    pid_namespace: (u64, u64),
}

/// Makes this rank's memory, opens that of all others, and returns once every rank has done so. From then on the memory belongs to
/// the ranks alone and goes with the last of them.
pub(super) fn connect(control: &dyn Control, options: &ShmOptions, deadline: Deadline) -> Result<TransportState> {
    let (rank, ranks) = (control.rank(), control.world_size());
    let key = control.derive_key("shared memory");
    // Settings that make no sense here may make sense elsewhere: the others must learn of them too.
    let made = Layout::new(ranks, options.lanes, options.ring_bytes).and_then(|layout| {
        let token = token(rank, options).map_err(unsupported(MADE))?;
        let (segment, file, peer_info) =
            create(rank, layout, options, token.as_ref(), &key).map_err(unsupported(MADE))?;
        Ok((layout, segment, file, token, peer_info))
    });
    let peer_info = made.as_ref().map(|(.., peer_info)| peer_info.clone()).map_err(Clone::clone);
    let peer_infos = control.gather_all("shared memory: made", MADE, peer_info, deadline)?;
    // Others open it by its descriptor, so it is kept until they have.
    let (layout, own, _file, token, _) = made?;

    let parks = peer_infos.iter().map(|theirs| theirs.parks).collect();
    check_settings(&peer_infos)?;
    let opened: RankResult<Vec<Arc<Segment>>> = peer_infos
        .iter()
        .enumerate()
        .filter(|(peer, _)| *peer != rank)
        .map(|(peer, theirs)| {
            open(
                theirs,
                &peer_infos[rank].machine,
                (layout, Layout::slot(peer, rank)),
                &proof(&key, peer, &theirs.nonce),
            )
            .map(Arc::new)
            .map_err(|why| format!("rank {rank} cannot use the memory of rank {peer}: {why}"))
        })
        .collect();
    let opened = opened.map_err(unsupported(OPENED));
    let readable = readable(rank, &peer_infos);
    let told = opened.as_ref().map(|_| readable.as_ref().err().cloned()).map_err(Clone::clone);
    let unreadable = control.gather_all("shared memory: opened", OPENED, told, deadline)?.into_iter().flatten().next();
    let single_copy = match (unreadable, readable, token) {
        (Some(why), ..) | (None, Err(why), _) => Err(why),
        (None, Ok(_), None) => Err(switched_off(rank)),
        (None, Ok(peers), Some(own)) => Ok(SingleCopy { peers, _own: own }),
    };
    let mut segments = opened?;
    segments.insert(rank, Arc::new(own));
    Ok(TransportState { rank, waiting: options.waiting, segments, parks, single_copy })
}

/// What the others need to read this rank's memory, if it wants that.
fn token(rank: usize, options: &ShmOptions) -> RankResult<Option<Token>> {
    if !options.single_copy {
        return Ok(None);
    }
    Token::generate().map(Some).map_err(|why| format!("rank {rank} has {why}"))
}

/// The memory of all other ranks, in rank order and none for this one, if this rank can read it.
fn readable(rank: usize, peer_infos: &[PeerInfo]) -> RankResult<Vec<Option<PeerMemory>>> {
    if let Some(without) = peer_infos.iter().position(|theirs| theirs.memory.is_none()) {
        return Err(switched_off(without));
    }
    let probe = |(peer, theirs): (usize, &PeerInfo)| match &theirs.memory {
        Some(memory) if peer != rank => PeerMemory::probe(theirs.process, memory)
            .map(Some)
            .map_err(|why| format!("rank {rank} cannot read the memory of rank {peer}: {why}")),
        _ => Ok(None),
    };
    peer_infos.iter().enumerate().map(probe).collect()
}

fn switched_off(rank: usize) -> String {
    format!("rank {rank} has it switched off")
}

/// What is not supported where a rank cannot have memory, and where it cannot open that of others.
const MADE: &str = "shared memory";
const OPENED: &str = "shared memory between all ranks";

fn unsupported(what: &str) -> impl FnOnce(String) -> Error {
    move |why| Error::Unsupported { what: what.into(), why }
}

fn create(
    rank: usize,
    layout: Layout,
    options: &ShmOptions,
    token: Option<&Token>,
    key: &[u8; 32],
) -> RankResult<(Segment, File, PeerInfo)> {
    let machine = MachineId::here()?;
    let make = || {
        let (segment, file) = Segment::create(layout)?;
        let metadata = file.metadata()?;
        Ok((segment, file, metadata))
    };
    let (segment, file, metadata) = make().map_err(|error: std::io::Error| {
        format!("rank {rank} cannot allocate {} B of shared memory: {}", layout.total(), descriptors::explain(&error))
    })?;
    let mut nonce = [0; PROOF_LEN];
    getrandom::fill(&mut nonce).map_err(|error| format!("rank {rank} cannot get random bytes: {error}"))?;
    segment.write_proof(&proof(key, rank, &nonce));
    let peer_info = PeerInfo {
        lanes: options.lanes,
        ring_bytes: options.ring_bytes,
        parks: options.waiting != Waiting::Busy,
        machine,
        process: std::process::id(),
        descriptor: std::os::fd::AsRawFd::as_raw_fd(&file),
        device: metadata.dev(),
        inode: metadata.ino(),
        nonce,
        memory: token.map(Token::info),
    };
    Ok((segment, file, peer_info))
}

/// The memory of another rank, with this layout, in which this rank has this slot.
fn open(
    theirs: &PeerInfo,
    here: &MachineId,
    (layout, slot): (Layout, usize),
    proof: &[u8; PROOF_LEN],
) -> RankResult<Segment> {
    if theirs.machine.boot != here.boot {
        return Err("it runs on another machine; choose a transport that connects machines, such as tcp or quic".into());
    }
    if theirs.machine.pid_namespace != here.pid_namespace {
        return Err(
            "it runs in another PID namespace, such as that of another container; start all ranks in the same one"
                .into(),
        );
    }
    let path = format!("/proc/{}/fd/{}", theirs.process, theirs.descriptor);
    let unreachable = |error: std::io::Error| match descriptors::ran_out(&error) {
        true => format!("{path}: {}", descriptors::explain(&error)),
        false => format!("{path}: {error}; the ranks must run as the same user and see each other in /proc"),
    };
    // Opening something else, a device for instance, could have consequences of its own.
    let name = fs::read_link(&path).map_err(unreachable)?;
    if !name.to_string_lossy().starts_with(&format!("/memfd:{MEMORY_NAME}")) {
        return Err(format!("{path} is {}, not shared memory", name.display()));
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(&path)
        .map_err(unreachable)?;
    let metadata = file.metadata().map_err(unreachable)?;
    if (metadata.dev(), metadata.ino()) != (theirs.device, theirs.inode) {
        return Err(format!("{path} is not the file that was announced"));
    }
    let segment =
        Segment::open(&file, layout, slot).map_err(|error| format!("mapping {} B: {error}", layout.total()))?;
    if !bool::from(segment.proof().ct_eq(proof)) {
        return Err(format!("{path} does not belong to this job"));
    }
    Ok(segment)
}

impl MachineId {
    fn here() -> RankResult<MachineId> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|error| format!("/proc is needed to share memory: boot_id: {error}"))?;
        // Where /proc shows another namespace than this process is in, its numbers mean other processes.
        let shown = fs::read_link("/proc/self").map_err(|error| format!("/proc is needed to share memory: {error}"))?;
        if shown != Path::new(&std::process::id().to_string()) {
            return Err("/proc shows the processes of another PID namespace".into());
        }
        let namespace =
            fs::metadata("/proc/self/ns/pid").map_err(|error| format!("this process's PID namespace: {error}"))?;
        Ok(MachineId { boot: boot.trim().into(), pid_namespace: (namespace.dev(), namespace.ino()) })
    }
}

/// The proof at the beginning of the memory of `rank`, which only ranks of the job can compute.
fn proof(key: &[u8; 32], rank: usize, nonce: &[u8; PROOF_LEN]) -> [u8; PROOF_LEN] {
    // HMAC takes keys of any length, so this cannot fail; if it did, no proof would match.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return [0; PROOF_LEN] };
    mac.update(&(rank as u64).to_le_bytes());
    mac.update(nonce);
    mac.finalize().into_bytes().into()
}

/// All ranks have the same information, so all come to the same answer.
fn check_settings(peer_infos: &[PeerInfo]) -> Result<()> {
    let Some(first) = peer_infos.first() else { return Ok(()) };
    let differs = |theirs: &PeerInfo| (theirs.lanes, theirs.ring_bytes) != (first.lanes, first.ring_bytes);
    match peer_infos.iter().position(differs) {
        None => Ok(()),
        Some(rank) => Err(Error::Rendezvous(format!(
            "shared memory: rank {rank} has {} lanes and rings of {} B, but rank 0 has {} lanes and rings of {} B; all ranks must use the \
             same",
            peer_infos[rank].lanes, peer_infos[rank].ring_bytes, first.lanes, first.ring_bytes
        ))),
    }
}
