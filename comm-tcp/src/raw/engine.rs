//! Moves the parts of an operation on over non-blocking sockets, in the thread of the caller.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use comm_core::spinner::{Next, Spinner};
use comm_core::{Deadline, Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::core::Core;

/// Rounds in which something moved before blocked parts and the deadline are looked at all the same.
const PASSES: u32 = 16;

const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// How far a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartState {
    /// A call may make progress.
    Ready,
    /// Its socket has to become ready first.
    Blocked,
    Done,
}

/// An operation in parts that progress independently of each other. Each is one direction of one socket.
pub(crate) trait PolledOperation {
    /// Number of parts.
    fn parts(&self) -> usize;

    /// Gets a part on as far as one call of the kernel does, or one each for a header and its payload.
    fn advance(&mut self, part: usize) -> Result<PartState>;

    /// The socket of a part, and what to wait for there.
    fn interest(&self, part: usize) -> Result<(BorrowedFd<'_>, PollFlags)>;

    /// The peer that a part waits for.
    fn peer(&self, part: usize) -> Option<usize>;

    /// Its name, for errors.
    fn operation(&self) -> String;
}

/// Ends every sleep in [`run`], now and later.
pub(crate) struct AbortSignal(OwnedFd);

impl AbortSignal {
    pub(crate) fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(AbortSignal)
            .map_err(|error| Error::io("making an event descriptor", error.into()))
    }

    pub(crate) fn raise(&self) {
        // It can fail only where it has been raised very often already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// Runs `work` to its end. `states` is memory that is used again.
///
/// # Errors
/// Those of a part, `Timeout` naming the peers of the parts that are left, or the error of an abort.
pub(crate) fn run(
    core: &Core,
    abort_signal: &AbortSignal,
    work: &mut impl PolledOperation,
    states: &mut Vec<PartState>,
    spinner: &mut Spinner,
    deadline: Deadline,
) -> Result<()> {
    states.clear();
    states.resize(work.parts(), PartState::Ready);
    for pass in 1_u32.. {
        let (mut left, mut waiting) = (0, true);
        for (part, state) in states.iter_mut().enumerate() {
            if *state == PartState::Ready {
                *state = work.advance(part)?;
                waiting &= *state != PartState::Ready;
            }
            left += usize::from(*state != PartState::Done);
        }
        if left == 0 {
            return Ok(());
        }
        if let Some(error) = core.aborted() {
            return Err(error);
        }
        if waiting {
            wait(core, abort_signal, work, states, spinner, deadline)?;
        } else if pass.is_multiple_of(PASSES) {
            if deadline.has_passed() {
                return Err(expired(core, work, states, deadline));
            }
            look(work, states, abort_signal, Some(NOT_AT_ALL))?;
        }
    }
    Ok(())
}

/// Returns once a part that was blocked is worth a try, or has got on by one.
fn wait(
    core: &Core,
    abort_signal: &AbortSignal,
    work: &mut impl PolledOperation,
    states: &mut [PartState],
    spinner: &mut Spinner,
    deadline: Deadline,
) -> Result<()> {
    let only_read = only_read(work, states)?;
    let mut wait = spinner.wait();
    loop {
        match (wait.next(deadline), only_read) {
            // Reading is the quickest way to see whether there is something to read.
            (Next::Look, Some(part)) => {
                let state = work.advance(part)?;
                if state != PartState::Blocked {
                    if let Some(slot) = states.get_mut(part) {
                        *slot = state;
                    }
                    return Ok(());
                }
            }
            (Next::Look, None) => {
                if look(work, states, abort_signal, Some(NOT_AT_ALL))? {
                    return Ok(());
                }
            }
            (Next::Park, _) => {
                let left = deadline.remaining();
                if left.is_zero() {
                    return Err(expired(core, work, states, deadline));
                }
                // `None` stands for a wait that is longer than the kernel can count.
                if look(work, states, abort_signal, Timespec::try_from(left).ok())? {
                    return Ok(());
                }
            }
            (Next::Expired, _) => return Err(expired(core, work, states, deadline)),
        }
        if let Some(error) = core.aborted() {
            return Err(error);
        }
    }
}

/// The part that is left, if it is a single one and reads.
fn only_read(work: &impl PolledOperation, states: &[PartState]) -> Result<Option<usize>> {
    let mut left = states.iter().enumerate().filter(|(_, state)| **state != PartState::Done).map(|(part, _)| part);
    match (left.next(), left.next()) {
        (Some(part), None) => Ok((work.interest(part)?.1 == PollFlags::IN).then_some(part)),
        _ => Ok(None),
    }
}

/// Asks the kernel which blocked parts may get on, waiting for one until `timeout`. Whether there is one.
fn look(
    work: &impl PolledOperation,
    states: &mut [PartState],
    abort_signal: &AbortSignal,
    timeout: Option<Timespec>,
) -> Result<bool> {
    let mut descriptors = Vec::with_capacity(states.len() + 1);
    for (part, _) in states.iter().enumerate().filter(|(_, state)| **state == PartState::Blocked) {
        let (socket, events) = work.interest(part)?;
        descriptors.push(PollFd::from_borrowed_fd(socket, events));
    }
    descriptors.push(PollFd::from_borrowed_fd(abort_signal.0.as_fd(), PollFlags::IN));
    match poll(&mut descriptors, timeout.as_ref()) {
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(false),
        Err(error) => return Err(Error::io("waiting for sockets", error.into())),
    }
    let mut found = false;
    let blocked = states.iter_mut().filter(|state| **state == PartState::Blocked);
    for (state, descriptor) in blocked.zip(&descriptors) {
        // Errors and hang-ups too: trying says what it is.
        if !descriptor.revents().is_empty() {
            *state = PartState::Ready;
            found = true;
        }
    }
    Ok(found)
}

fn expired(core: &Core, work: &impl PolledOperation, states: &[PartState], deadline: Deadline) -> Error {
    let left = states.iter().enumerate().filter(|(_, state)| **state != PartState::Done);
    let mut peers: Vec<usize> = left.filter_map(|(part, _)| work.peer(part)).collect();
    peers.sort_unstable();
    peers.dedup();
    core.timeout(work.operation(), deadline, peers)
}
