//! One exchange: what is left to send and to receive, and the wait for it.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context as Waker, Poll};

use comm_core::driver::passed;
use comm_core::spinner::{Next, Spinner};
use comm_core::{Deadline, Error, Result};
use tokio::sync::watch;

use crate::message::{Channel, Context, Receiving, Sending, Step};

/// One direction of an exchange with one peer.
pub(crate) struct Transfer<'a> {
    pub(crate) peer: usize,
    pub(crate) direction: Direction<'a>,
    pub(crate) is_done: bool,
}

/// What a transfer does: it sends or receives.
pub(crate) enum Direction<'a> {
    Send(Sending<'a>),
    Receive(Receiving<'a>),
}

impl<'a> Transfer<'a> {
    pub(crate) fn new(peer: usize, direction: Direction<'a>) -> Self {
        Transfer { peer, direction, is_done: false }
    }

    /// Bytes that it has received so far.
    pub(crate) fn received(&self) -> u64 {
        match &self.direction {
            Direction::Send(_) => 0,
            Direction::Receive(receiving) => receiving.received(),
        }
    }

    fn poll(&mut self, cx: &mut Waker<'_>, channels: &mut [Option<Channel>], operation: &str) -> Result<Step> {
        let context = Context { peer: self.peer, operation };
        let Some(Some(channel)) = channels.get_mut(self.peer) else {
            return Err(Error::Internal(format!("{operation}: there is no channel to rank {}", self.peer)));
        };
        let step = match &mut self.direction {
            Direction::Send(sending) => sending.poll(cx, channel, context),
            Direction::Receive(receiving) => receiving.poll(cx, channel, context),
        }?;
        self.is_done = step == Step::Done;
        Ok(step)
    }
}

/// Polls every transfer that is not done.
pub(crate) fn poll_all(
    transfers: &mut [Transfer<'_>],
    cx: &mut Waker<'_>,
    channels: &mut [Option<Channel>],
    operation: &str,
) -> Result<Step> {
    let (mut is_done, mut furthest) = (true, Step::Blocked);
    for transfer in transfers.iter_mut().filter(|transfer| !transfer.is_done) {
        match transfer.poll(cx, channels, operation)? {
            Step::Done => furthest = furthest.max(Step::Moved),
            step => {
                is_done = false;
                furthest = furthest.max(step);
            }
        }
    }
    Ok(if is_done { Step::Done } else { furthest })
}

/// Looks at some work with `poll` until it is done, waiting as `spinner` says whenever it is blocked; false at the deadline. What
/// is announced on `aborted` ends the wait.
pub(crate) async fn complete(
    spinner: &mut Spinner,
    deadline: Deadline,
    aborted: watch::Receiver<Option<Error>>,
    mut poll: impl FnMut(&mut Waker<'_>) -> Result<Step>,
) -> Result<bool> {
    let mut aborted = pin!(announced_error(aborted));
    // Made when the thread is about to sleep for the first time: many exchanges never do.
    let mut timer = None;
    loop {
        // Each wait ends when something moves, so that the spinner learns how long nothing did.
        let mut wait = spinner.wait();
        let step = poll_fn(|cx| {
            match poll(cx) {
                Ok(Step::Blocked) => {}
                outcome => return Poll::Ready(outcome.map(Some)),
            }
            if let Poll::Ready(error) = aborted.as_mut().poll(cx) {
                return Poll::Ready(Err(error));
            }
            match wait.next(deadline) {
                Next::Look => {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
                Next::Expired => Poll::Ready(Ok(None)),
                Next::Park => {
                    let timer = timer.get_or_insert_with(|| Box::pin(passed(deadline)));
                    timer.as_mut().poll(cx).map(|()| Ok(None))
                }
            }
        });
        match step.await? {
            None => return Ok(false),
            Some(Step::Done) => return Ok(true),
            Some(Step::Turn) if deadline.has_passed() => return Ok(false),
            Some(Step::Turn) => tokio::task::yield_now().await,
            Some(Step::Moved | Step::Blocked) => {}
        }
    }
}

/// The error that is announced on `channel`, when it is.
pub(crate) async fn announced_error(mut channel: watch::Receiver<Option<Error>>) -> Error {
    let announced = channel.wait_for(Option::is_some).await.ok().and_then(|error| error.clone());
    match announced {
        Some(error) => error,
        // The sender is gone, so none will come.
        None => std::future::pending().await,
    }
}
