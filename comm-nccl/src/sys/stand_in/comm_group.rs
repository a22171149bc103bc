//! What ranks do together: the calls of a group, once its stream has come to it.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{ptr, slice};

use super::reduce::{reduced, scale, size};
use super::stream::{Context, lock};

/// The ranks of one communicator.
#[derive(Default)]
pub(super) struct CommGroup {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) ranks: usize,
    pub(super) joined: usize,
    /// Ranks that destroy it or have aborted it.
    pub(super) leaving: usize,
    /// Collectives that not all ranks have been through, by number.
    collectives: HashMap<u64, PendingCall>,
    /// Messages from one rank to another.
    messages: HashMap<(usize, usize), VecDeque<Arc<Message>>>,
}

#[derive(Default)]
struct PendingCall {
    parts: HashMap<usize, (Shape, Vec<u8>)>,
    done: usize,
}

struct Message {
    bytes: Vec<u8>,
    is_taken: AtomicBool,
}

/// What ranks must agree on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) kind: Kind,
    pub(super) count: usize,
    pub(super) dtype: c_int,
    /// 5 for every scaled sum.
    pub(super) op: c_int,
    pub(super) root: c_int,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
}

/// One rank's communicator.
pub(super) struct RankComm {
    pub(super) context: &'static Context,
    pub(super) comm_group: Arc<CommGroup>,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) is_aborted: AtomicBool,
    pub(super) numbers: AtomicU64,
    /// Factors of scaled sums, by number of the operation.
    pub(super) factors: Mutex<HashMap<c_int, [u8; 8]>>,
}

/// A call within a group.
pub(super) enum GroupedCall {
    Collective { shape: Shape, factor: Option<[u8; 8]>, from: usize, to: usize },
    Send { from: usize, bytes: usize, peer: usize },
    Recv { to: usize, bytes: usize, peer: usize },
}

/// All calls of a group at once: whatever this rank gives is there before it waits for anything.
pub(super) fn run(own: &RankComm, calls: &[(u64, GroupedCall)]) {
    let comm_group = &*own.comm_group;
    let mut sent = Vec::new();
    let mut state = lock(&comm_group.state);
    for (number, work) in calls {
        match *work {
            GroupedCall::Collective { shape, factor, from, .. } => {
                let mut bytes = read(from, contribution(&shape, own.rank, own.ranks));
                if let Some(factor) = factor {
                    scale(shape.dtype, &mut bytes, factor);
                }
                state.collectives.entry(*number).or_default().parts.insert(own.rank, (shape, bytes));
            }
            GroupedCall::Send { from, bytes, peer } => {
                let message = Arc::new(Message { bytes: read(from, bytes), is_taken: AtomicBool::new(false) });
                state.messages.entry((own.rank, peer)).or_default().push_back(message.clone());
                sent.push(message);
            }
            GroupedCall::Recv { .. } => {}
        }
    }
    comm_group.changed.notify_all();
    for (number, work) in calls {
        match *work {
            GroupedCall::Recv { to, bytes, peer } => {
                let key = (peer, own.rank);
                // One of another length is never taken, as NCCL may hang.
                let fits = |state: &State| {
                    state
                        .messages
                        .get(&key)
                        .and_then(VecDeque::front)
                        .is_some_and(|message| message.bytes.len() == bytes)
                };
                let Some(mut there) = wait(own, state, &fits) else { return };
                if let Some(message) = there.messages.get_mut(&key).and_then(VecDeque::pop_front) {
                    write(to, &message.bytes);
                    message.is_taken.store(true, Ordering::SeqCst);
                }
                comm_group.changed.notify_all();
                state = there;
            }
            GroupedCall::Collective { shape, to, .. } => {
                let agreed = |state: &State| {
                    state.collectives.get(number).is_some_and(|pending| {
                        pending.parts.len() == own.ranks && pending.parts.values().all(|(theirs, _)| *theirs == shape)
                    })
                };
                let Some(mut there) = wait(own, state, &agreed) else { return };
                if let Some(pending) = there.collectives.get_mut(number) {
                    finish(&shape, own, pending, to);
                    pending.done += 1;
                    if pending.done == own.ranks {
                        there.collectives.remove(number);
                    }
                }
                state = there;
            }
            GroupedCall::Send { .. } => {}
        }
    }
    let all_taken = |_: &State| sent.iter().all(|message| message.is_taken.load(Ordering::SeqCst));
    drop(wait(own, state, &all_taken));
}

/// Waits until it is so; `None` once this rank's communicator is aborted, or its device lost.
fn wait<'a>(
    own: &'a RankComm,
    mut state: MutexGuard<'a, State>,
    is_so: &dyn Fn(&State) -> bool,
) -> Option<MutexGuard<'a, State>> {
    while !is_so(&state) {
        if own.is_aborted.load(Ordering::SeqCst) || own.context.is_lost() {
            return None;
        }
        let waited = own.comm_group.changed.wait_timeout(state, Duration::from_millis(20));
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    Some(state)
}

/// Bytes that a rank gives.
fn contribution(shape: &Shape, rank: usize, ranks: usize) -> usize {
    let bytes = shape.count * size(shape.dtype);
    match shape.kind {
        Kind::ReduceScatter => bytes * ranks,
        Kind::Broadcast if shape.root as usize != rank => 0,
        _ => bytes,
    }
}

/// Writes what a rank gets.
fn finish(shape: &Shape, own: &RankComm, pending: &PendingCall, to: usize) {
    let parts: Vec<&[u8]> =
        (0..own.ranks).filter_map(|rank| pending.parts.get(&rank)).map(|(_, bytes)| bytes.as_slice()).collect();
    let bytes = shape.count * size(shape.dtype);
    let shards = |start: usize| parts.iter().map(|part| &part[start..start + bytes]).collect::<Vec<_>>();
    let reduced = |start: usize| reduced(shape.dtype, shape.op, &shards(start));
    match shape.kind {
        Kind::AllReduce => write(to, &reduced(0)),
        Kind::Reduce if shape.root as usize == own.rank => write(to, &reduced(0)),
        Kind::Reduce => {}
        Kind::ReduceScatter => write(to, &reduced(own.rank * bytes)),
        Kind::Broadcast => write(to, parts[shape.root as usize]),
        Kind::AllGather => write(to, &parts.concat()),
    }
}

fn read(from: usize, bytes: usize) -> Vec<u8> {
    if bytes == 0 {
        return Vec::new();
    }
    // SAFETY: whoever makes a call keeps its memory until the call has run.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(from), bytes) }.to_vec()
}

fn write(to: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), ptr::with_exposed_provenance_mut(to), bytes.len()) };
    }
}
