//! The other end of an operation that was started.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::buffer::{Buffer, Element};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// An operation that ended well.
#[derive(Debug)]
pub struct Completed {
    /// The buffer that went in with the call.
    pub buffer: Buffer,
    /// The input that went in with the call, unchanged.
    pub input: Option<Buffer>,
    /// When its first message could be sent: after those before it on its lane.
    pub began: Instant,
    /// When it ended.
    pub ended: Instant,
}

/// An operation that failed.
#[derive(Debug)]
pub struct Failed {
    /// Why.
    pub error: Error,
    /// The buffer that went in with the call, partly overwritten; `None` if it is lost.
    pub buffer: Option<Buffer>,
    /// The input that went in with the call, unchanged; `None` if there was none, or it is lost.
    pub input: Option<Buffer>,
}

impl Failed {
    /// The error alone.
    pub fn into_error(self) -> Error {
        self.error
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        failed.error
    }
}

/// How an operation ended.
pub type Outcome = std::result::Result<Completed, Failed>;

/// A started operation. Dropping it does not stop the operation.
///
/// It is a future too, of no particular runtime: awaiting it gives what [`wait`](Handle::wait) gives.
#[derive(Debug)]
#[must_use = "the buffer and any error come out of `wait`"]
pub struct Handle {
    state: State,
}

#[derive(Debug)]
enum State {
    Done(Box<Outcome>),
    Pending(Arc<Slot>),
    /// It was awaited to its end.
    Taken,
}

impl Handle {
    /// A handle of an operation that has already ended.
    pub fn done(outcome: Outcome) -> Self {
        Handle { state: State::Done(Box::new(outcome)) }
    }

    /// A handle of an operation under way, and the end through which its backend completes it.
    pub fn pending() -> (Completer, Self) {
        let slot = Arc::new(Slot::default());
        (Completer { slot: slot.clone() }, Handle { state: State::Pending(slot) })
    }

    /// Whether [`wait`](Handle::wait) would return at once.
    pub fn test(&mut self) -> bool {
        if let State::Pending(slot) = &self.state {
            let Some(outcome) = slot.lock().outcome.take() else { return false };
            self.state = State::Done(Box::new(outcome));
        }
        true
    }

    /// Waits for the end, which the operation's own deadline bounds.
    ///
    /// # Errors
    /// Why it failed, with the buffer.
    pub fn wait(self) -> Outcome {
        match self.state {
            State::Done(outcome) => *outcome,
            State::Pending(slot) => slot.wait(),
            State::Taken => Err(without_result(TAKEN)),
        }
    }

    /// Waits for at most `timeout`, after which the operation goes on.
    ///
    /// # Errors
    /// The handle itself when the operation has not ended by then.
    pub fn wait_timeout(self, timeout: Duration) -> std::result::Result<Outcome, Handle> {
        match self.state {
            State::Done(outcome) => Ok(*outcome),
            State::Pending(slot) => {
                slot.wait_until(Deadline::after(timeout)).ok_or(Handle { state: State::Pending(slot) })
            }
            State::Taken => Ok(Err(without_result(TAKEN))),
        }
    }
}

impl Future for Handle {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        match std::mem::replace(&mut self.state, State::Taken) {
            State::Done(outcome) => Poll::Ready(*outcome),
            State::Pending(slot) => match slot.poll(context.waker()) {
                Some(outcome) => Poll::Ready(outcome),
                None => {
                    self.state = State::Pending(slot);
                    Poll::Pending
                }
            },
            State::Taken => Poll::Ready(Err(without_result(TAKEN))),
        }
    }
}

/// A started operation whose result is an `R`: what the asynchronous forms of
/// [`CommunicatorExt`](crate::CommunicatorExt) give. Dropping it does not stop the operation.
///
/// ```
/// use std::time::Duration;
/// use comm_core::{Communicator, CommunicatorExt, ReduceOp, local};
///
/// # fn compute() {}
/// let sums = local::run(2, |comm| -> comm_core::Result<_> {
///     let gradients = vec![comm.rank() as f32; 1000];
///     let mut sum = comm.all_reduce_async(gradients, ReduceOp::Sum);
///     // Another one at the same time, on another lane.
///     let least = comm.on_lane(1).all_reduce_async(vec![comm.rank() as i64], ReduceOp::Min);
///     while !sum.test() {
///         compute();
///     }
///     let least = match least.wait_timeout(Duration::from_secs(10)) {
///         Ok(result) => result?,
///         Err(still_pending) => still_pending.wait()?,
///     };
///     Ok((sum.wait()?[999], least[0]))
/// });
/// for sum in sums {
///     assert_eq!(sum?, (1.0, 0));
/// }
/// # Ok::<(), comm_core::Error>(())
/// ```
///
/// It is a future of no particular runtime, so it can be awaited under tokio or any other one:
///
/// ```
/// use comm_core::{Communicator, CommunicatorExt, Error, ReduceOp, local};
///
/// async fn step(comm: &dyn Communicator) -> Result<Vec<f32>, Error> {
///     comm.all_reduce_async(vec![1.0; 4], ReduceOp::Mean).await
/// }
/// # let means = local::run(2, |comm| {
/// #     let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
/// #     runtime.block_on(step(comm)).unwrap()
/// # });
/// # assert_eq!(means, [[1.0; 4]; 2]);
/// ```
#[must_use = "the result and any error come out of `wait` or `.await`"]
pub struct Pending<R> {
    handle: Handle,
    read: fn(Completed) -> Result<R>,
}

impl<R> Pending<R> {
    /// The operation behind `handle`, whose result `read` takes out of its buffers.
    pub fn new(handle: Handle, read: fn(Completed) -> Result<R>) -> Self {
        Pending { handle, read }
    }

    /// Whether [`wait`](Pending::wait) would return at once.
    pub fn test(&mut self) -> bool {
        self.handle.test()
    }

    /// Waits for the result, which the operation's own deadline bounds.
    ///
    /// # Errors
    /// The operation's. The values that went in are dropped then; [`into_handle`](Pending::into_handle) keeps them.
    pub fn wait(self) -> Result<R> {
        result(self.handle.wait(), self.read)
    }

    /// Waits for at most `timeout`, after which the operation goes on.
    ///
    /// # Errors
    /// The operation, still pending, when it has not ended by then.
    pub fn wait_timeout(self, timeout: Duration) -> std::result::Result<Result<R>, Self> {
        let Pending { handle, read } = self;
        match handle.wait_timeout(timeout) {
            Ok(outcome) => Ok(result(outcome, read)),
            Err(handle) => Err(Pending { handle, read }),
        }
    }

    /// The operation, with its buffers as they are.
    pub fn into_handle(self) -> Handle {
        self.handle
    }
}

impl<T: Element> Pending<Vec<T>> {
    /// The operation behind `handle`, whose result is the values of its buffer.
    pub fn values(handle: Handle) -> Self {
        Pending::new(handle, |completed| completed.buffer.into_vec())
    }
}

impl<R> Future for Pending<R> {
    type Output = Result<R>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R>> {
        let read = self.read;
        pin!(&mut self.handle).poll(context).map(|outcome| result(outcome, read))
    }
}

impl<R> std::fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pending").field(&self.handle).finish()
    }
}

fn result<R>(outcome: Outcome, read: fn(Completed) -> Result<R>) -> Result<R> {
    read(outcome.map_err(Failed::into_error)?)
}

/// Completes a pending [`Handle`]. If it is dropped instead, the operation has failed.
#[derive(Debug)]
pub struct Completer {
    slot: Arc<Slot>,
}

impl Completer {
    /// Hands over the outcome. If the handle was dropped, so is the outcome.
    pub fn complete(self, outcome: Outcome) {
        self.slot.end(|| outcome);
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        self.slot.end(|| Err(without_result("the thread that ran the operation ended without a result")));
    }
}

/// Where an outcome waits for its handle.
#[derive(Debug, Default)]
struct Slot {
    state: Mutex<SlotState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SlotState {
    outcome: Option<Outcome>,
    /// An outcome has come, and may have been taken.
    has_ended: bool,
    /// A thread waits. Without one nothing is announced, which costs a system call.
    is_awaited: bool,
    /// Of the task that awaits it.
    waker: Option<Waker>,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the first outcome.
    fn end(&self, outcome: impl FnOnce() -> Outcome) {
        let mut state = self.lock();
        if state.has_ended {
            return;
        }
        state.has_ended = true;
        state.outcome = Some(outcome());
        let (is_awaited, waker) = (state.is_awaited, state.waker.take());
        drop(state);
        if is_awaited {
            self.changed.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn wait(&self) -> Outcome {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            state.is_awaited = true;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// `None` at the deadline.
    fn wait_until(&self, deadline: Deadline) -> Option<Outcome> {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.outcome.take() {
                return Some(outcome);
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return None;
            }
            state.is_awaited = true;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The outcome; without one `waker` is woken when it comes.
    fn poll(&self, waker: &Waker) -> Option<Outcome> {
        let mut state = self.lock();
        let outcome = state.outcome.take();
        if outcome.is_none() && !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        outcome
    }
}

const TAKEN: &str = "the outcome of an operation was asked for a second time";

fn without_result(why: &str) -> Failed {
    Failed { error: Error::Internal(why.into()), buffer: None, input: None }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::thread;

    use super::*;

    /// Far above what a busy machine takes.
    const SOON: Duration = Duration::from_secs(20);

    fn completed(values: Vec<i32>) -> Outcome {
        let now = Instant::now();
        Ok(Completed { buffer: Buffer::from_vec(values), input: None, began: now, ended: now })
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn the_last_task_that_asked_is_woken_once() {
        let (completer, handle) = Handle::pending();
        let mut pending = Pending::<Vec<i32>>::values(handle);
        let tasks = [Arc::new(Wakes::default()), Arc::new(Wakes::default())];
        for wakes in [&tasks[0], &tasks[1], &tasks[1]] {
            let waker = Waker::from(wakes.clone());
            assert!(Pin::new(&mut pending).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        completer.complete(completed(vec![7]));
        assert_eq!(tasks.each_ref().map(|wakes| wakes.0.load(Ordering::SeqCst)), [0, 1]);
        let mut poll = || Pin::new(&mut pending).poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(poll(), Poll::Ready(Ok(values)) if values == [7]));
        // A future that is polled again is a mistake, and no reason to panic.
        assert!(matches!(poll(), Poll::Ready(Err(Error::Internal(_)))));
        assert!(pending.test() && pending.wait().is_err());
    }

    #[test]
    fn every_way_of_waiting_sees_the_end() {
        for way in 0..3 {
            let (completer, handle) = Handle::pending();
            let mut pending = Pending::<Vec<i32>>::values(handle);
            assert!(!pending.test());
            let mut pending = pending.wait_timeout(Duration::from_millis(20)).unwrap_err();
            let ending = thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                completer.complete(completed(vec![1, 2]));
            });
            let result = match way {
                0 => pending.wait(),
                1 => pending.wait_timeout(SOON).unwrap(),
                _ => {
                    while !pending.test() {
                        thread::yield_now();
                    }
                    pending.wait()
                }
            };
            assert_eq!(result.unwrap(), [1, 2]);
            ending.join().unwrap();
        }
    }

    #[test]
    fn what_ends_without_a_result_or_with_another_type_is_an_error() {
        let (completer, handle) = Handle::pending();
        let pending = Pending::<Vec<i32>>::values(handle);
        drop(completer);
        assert!(matches!(pending.wait(), Err(Error::Internal(what)) if what.contains("without a result")));
        let floats = Pending::<Vec<f32>>::values(Handle::done(completed(vec![1])));
        assert!(matches!(floats.wait(), Err(Error::InvalidArgument(_))));
    }

    #[test]
    fn the_outcome_of_a_dropped_handle_is_dropped() {
        let (completer, handle) = Handle::pending();
        let slot = Arc::downgrade(&completer.slot);
        drop(handle);
        completer.complete(completed(vec![3]));
        assert!(slot.upgrade().is_none());
    }
}
