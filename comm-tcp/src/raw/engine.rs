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

    pub(crate) fn ring(&self) {
        // It can fail only where it has been rung very often already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// Runs `work` to its end. `stages` is memory that is used again.
///
/// # Errors
/// Those of a part, `Timeout` naming the peers of the parts that are left, or the error of an abort.
pub(crate) fn run(
    core: &Core,
    alarm: &AbortSignal,
    work: &mut impl PolledOperation,
    stages: &mut Vec<PartState>,
    spinner: &mut Spinner,
    deadline: Deadline,
) -> Result<()> {
    stages.clear();
    stages.resize(work.parts(), PartState::Ready);
    for pass in 1_u32.. {
        let (mut left, mut waiting) = (0, true);
        for (part, stage) in stages.iter_mut().enumerate() {
            if *stage == PartState::Ready {
                *stage = work.advance(part)?;
                waiting &= *stage != PartState::Ready;
            }
            left += usize::from(*stage != PartState::Done);
        }
        if left == 0 {
            return Ok(());
        }
        if let Some(error) = core.aborted() {
            return Err(error);
        }
        if waiting {
            wait(core, alarm, work, stages, spinner, deadline)?;
        } else if pass.is_multiple_of(PASSES) {
            if deadline.has_passed() {
                return Err(expired(core, work, stages, deadline));
            }
            look(work, stages, alarm, Some(NOT_AT_ALL))?;
        }
    }
    Ok(())
}

/// Returns once a part that was blocked is worth a try, or has got on by one.
fn wait(
    core: &Core,
    alarm: &AbortSignal,
    work: &mut impl PolledOperation,
    stages: &mut [PartState],
    spinner: &mut Spinner,
    deadline: Deadline,
) -> Result<()> {
    let only_read = only_read(work, stages)?;
    let mut wait = spinner.wait();
    loop {
        match (wait.next(deadline), only_read) {
            // Reading is the quickest way to see whether there is something to read.
            (Next::Look, Some(part)) => {
                let stage = work.advance(part)?;
                if stage != PartState::Blocked {
                    if let Some(slot) = stages.get_mut(part) {
                        *slot = stage;
                    }
                    return Ok(());
                }
            }
            (Next::Look, None) => {
                if look(work, stages, alarm, Some(NOT_AT_ALL))? {
                    return Ok(());
                }
            }
            (Next::Park, _) => {
                let left = deadline.remaining();
                if left.is_zero() {
                    return Err(expired(core, work, stages, deadline));
                }
                // `None` stands for a wait that is longer than the kernel can count.
                if look(work, stages, alarm, Timespec::try_from(left).ok())? {
                    return Ok(());
                }
            }
            (Next::Expired, _) => return Err(expired(core, work, stages, deadline)),
        }
        if let Some(error) = core.aborted() {
            return Err(error);
        }
    }
}

/// The part that is left, if it is a single one and reads.
fn only_read(work: &impl PolledOperation, stages: &[PartState]) -> Result<Option<usize>> {
    let mut left = stages.iter().enumerate().filter(|(_, stage)| **stage != PartState::Done).map(|(part, _)| part);
    match (left.next(), left.next()) {
        (Some(part), None) => Ok((work.interest(part)?.1 == PollFlags::IN).then_some(part)),
        _ => Ok(None),
    }
}

/// Asks the kernel which blocked parts may get on, waiting for one until `timeout`. Whether there is one.
fn look(
    work: &impl PolledOperation,
    stages: &mut [PartState],
    alarm: &AbortSignal,
    timeout: Option<Timespec>,
) -> Result<bool> {
    let mut descriptors = Vec::with_capacity(stages.len() + 1);
    for (part, _) in stages.iter().enumerate().filter(|(_, stage)| **stage == PartState::Blocked) {
        let (socket, events) = work.interest(part)?;
        descriptors.push(PollFd::from_borrowed_fd(socket, events));
    }
    descriptors.push(PollFd::from_borrowed_fd(alarm.0.as_fd(), PollFlags::IN));
    match poll(&mut descriptors, timeout.as_ref()) {
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(false),
        Err(error) => return Err(Error::io("waiting for sockets", error.into())),
    }
    let mut found = false;
    let blocked = stages.iter_mut().filter(|stage| **stage == PartState::Blocked);
    for (stage, descriptor) in blocked.zip(&descriptors) {
        // Errors and hang-ups too: trying says what it is.
        if !descriptor.revents().is_empty() {
            *stage = PartState::Ready;
            found = true;
        }
    }
    Ok(found)
}

fn expired(core: &Core, work: &impl PolledOperation, stages: &[PartState], deadline: Deadline) -> Error {
    let left = stages.iter().enumerate().filter(|(_, stage)| **stage != PartState::Done);
    let mut peers: Vec<usize> = left.filter_map(|(part, _)| work.peer(part)).collect();
    peers.sort_unstable();
    peers.dedup();
    core.timeout(work.operation(), deadline, peers)
}
