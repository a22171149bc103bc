//! What both transports share: the runtime, deadlines, abort, and running the two directions of many peers at once.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use comm_core::{Control, Deadline, Error, Incoming, Outgoing, Result};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;

/// One worker thread, whatever the number of peers; exchanges run in their callers' threads.
pub(crate) struct Core {
    runtime: Option<Runtime>,
    aborted: watch::Sender<Option<Error>>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) lanes: usize,
}

impl Core {
    pub(crate) fn new(name: &str, rank: usize, world_size: usize, lanes: usize) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(format!("comm-{name}"))
            // `zeromq` removes its socket files on a blocking thread; it shall not stay.
            .max_blocking_threads(1)
            .thread_keep_alive(Duration::from_millis(10))
            .enable_all()
            .build()
            .map_err(|error| Error::io(format!("rank {rank}: starting the runtime of {name}"), error))?;
        Ok(Core { runtime: Some(runtime), aborted: watch::Sender::new(None), rank, world_size, lanes })
    }

    pub(crate) fn abort(&self, error: &Error) {
        self.aborted.send_if_modified(|aborted| {
            let first = aborted.is_none();
            if first {
                *aborted = Some(error.clone());
            }
            first
        });
    }

    pub(crate) fn aborted(&self) -> Option<Error> {
        self.aborted.borrow().clone()
    }

    /// Runs `future` in this thread.
    ///
    /// # Errors
    /// `InvalidArgument` from within an asynchronous task: waiting there would block the task's own runtime.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        if Handle::try_current().is_ok() {
            return Err(Error::invalid(format!(
                "rank {}: a blocking call of a transport was made from within an asynchronous task; use a thread",
                self.rank
            )));
        }
        match &self.runtime {
            Some(runtime) => runtime.handle().block_on(future),
            None => Err(Error::invalid("the transport is being dropped")),
        }
    }

    /// Runs `future` until it ends, the deadline passes, or the transport is aborted, whichever comes first.
    /// `waiting_for` names the peers for the error.
    pub(crate) async fn bounded<F, T>(
        &self,
        operation: impl Fn() -> String,
        deadline: Deadline,
        future: &mut F,
        waiting_for: impl Fn(&F) -> Vec<usize>,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Unpin,
    {
        let mut aborted = self.aborted.subscribe();
        let mut aborted = pin!(async move {
            let error = aborted.wait_for(Option::is_some).await.ok().and_then(|error| error.clone());
            match error {
                Some(error) => error,
                // The sender lives as long as `self`.
                None => std::future::pending().await,
            }
        });
        let mut expired = pin!(tokio::time::sleep_until(deadline.instant().into()));
        let outcome = std::future::poll_fn(|cx| {
            if let Poll::Ready(result) = Pin::new(&mut *future).poll(cx) {
                return Poll::Ready(Some(result));
            }
            if let Poll::Ready(error) = aborted.as_mut().poll(cx) {
                return Poll::Ready(Some(Err(error)));
            }
            expired.as_mut().poll(cx).map(|()| None)
        })
        .await;
        outcome.unwrap_or_else(|| {
            Err(Error::Timeout {
                rank: self.rank,
                operation: operation(),
                waited: deadline.waited(),
                waiting_for: waiting_for(future),
            })
        })
    }

    /// Refuses an exchange that makes no sense.
    pub(crate) fn check(&self, lane: usize, outgoing: &[Outgoing<'_>], incoming: &[Incoming<'_>]) -> Result<()> {
        if let Some(error) = self.aborted() {
            return Err(error);
        }
        if lane >= self.lanes {
            return Err(Error::invalid(format!("lane {lane} of {}", self.lanes)));
        }
        for message in outgoing {
            if message.header.payload_len != message.payload.len() as u64 {
                return Err(Error::invalid(format!(
                    "a message to rank {} whose header says {} B and that has {} B",
                    message.peer,
                    message.header.payload_len,
                    message.payload.len()
                )));
            }
        }
        self.check_peers("to", outgoing.iter().map(|message| message.peer))?;
        self.check_peers("from", incoming.iter().map(|message| message.peer))
    }

    fn check_peers(&self, direction: &str, peers: impl Iterator<Item = usize> + Clone) -> Result<()> {
        for (index, peer) in peers.clone().enumerate() {
            if peer >= self.world_size || peer == self.rank {
                return Err(Error::invalid(format!(
                    "rank {} of {}: a message {direction} rank {peer}",
                    self.rank, self.world_size
                )));
            }
            if peers.clone().take(index).any(|earlier| earlier == peer) {
                return Err(Error::invalid(format!("rank {}: two messages {direction} rank {peer}", self.rank)));
            }
        }
        Ok(())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// What an error says was going on.
pub(crate) fn describe(lane: usize, outgoing: &[Outgoing<'_>]) -> String {
    match outgoing {
        [message, ..] => format!("{} on lane {lane}", message.header),
        [] => format!("a receive on lane {lane}"),
    }
}

/// Waits for `future` while the job lives: its failure ends the wait. Used while connecting, when nobody can abort yet.
pub(crate) async fn unless_failed<T>(control: &dyn Control, future: impl Future<Output = Result<T>>) -> Result<T> {
    let mut future = pin!(future);
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    std::future::poll_fn(|cx| {
        if let Poll::Ready(result) = future.as_mut().poll(cx) {
            return Poll::Ready(result);
        }
        while tick.poll_tick(cx).is_ready() {
            if let Some(error) = control.failure() {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Pending
    })
    .await
}

/// Lets everything else that is ready go first.
pub(crate) async fn give_way() {
    let mut given = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut given, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

type Boxed<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Parts of one operation that progress independently of each other, all in one task; the first error ends it.
#[derive(Default)]
pub(crate) struct Join<'a> {
    parts: Vec<(usize, Option<Boxed<'a>>)>,
    turn: usize,
}

impl<'a> Join<'a> {
    /// Adds a part that waits for `peer`.
    pub(crate) fn push(&mut self, peer: usize, part: impl Future<Output = Result<()>> + 'a) {
        self.parts.push((peer, Some(Box::pin(part))));
    }

    /// The peers that parts are still waiting for, in order.
    pub(crate) fn waiting_for(&self) -> Vec<usize> {
        let mut peers: Vec<usize> =
            self.parts.iter().filter(|(_, part)| part.is_some()).map(|(peer, _)| *peer).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }
}

impl Future for Join<'_> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        // Another part goes first each time: a poll has a budget, and a part that is always ready would use it up.
        let count = this.parts.len();
        this.turn = this.turn.wrapping_add(1);
        let (later, first) = this.parts.split_at_mut(if count == 0 { 0 } else { this.turn % count });
        let mut waiting = false;
        for (_, slot) in first.iter_mut().chain(later) {
            let Some(part) = slot else { continue };
            match part.as_mut().poll(cx) {
                Poll::Ready(Ok(())) => *slot = None,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => waiting = true,
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(Ok(())) }
    }
}
