//! An asynchronous runtime that its callers drive (feature `tokio`), for transports on asynchronous protocol libraries.
//!
//! A runtime with threads of its own costs two hand-overs a message: the thread that waits for the socket wakes the one that
//! waits in the exchange, each time tens of microseconds on a core that has gone idle. Here the thread inside [`Driver::run`]
//! waits for the sockets itself. While no thread is inside, a *keeper* thread does, so that what was queued goes out,
//! acknowledgements are sent and timers fire although the rank computes.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;
use tokio::task::coop;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::spinner::{Next, Spinner};

/// How long the runtime stays undriven after a call before the keeper takes over. Calls that follow each other closely never
/// meet it.
const GRACE: Duration = Duration::from_micros(300);

/// How long the keeper sleeps at most while a call takes long. Whoever leaves work behind wakes it.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

/// Whether the calling thread may wait in a runtime of its own: not where it polls the tasks of a tokio runtime, which would all stand still,
/// and where tokio panics. It may in tokio's `spawn_blocking` and `block_in_place`, which are made for that, and under a guard of
/// `Handle::enter`.
///
/// # Errors
/// `InvalidArgument`, with what to do instead.
pub fn may_block() -> Result<()> {
    if Handle::try_current().is_err() || !polls_tasks() {
        return Ok(());
    }
    Err(Error::invalid(
        "a blocking call of a transport was made from within an asynchronous task; make it on a thread of its own, or in tokio's \
         spawn_blocking or block_in_place",
    ))
}

/// Whether this thread is polling a future for a tokio runtime. There is no call that says so without a panic.
fn polls_tasks() -> bool {
    /// More than tokio lets a task do before it must give way (128 in its version 1).
    const MORE_THAN_A_TURN: usize = 1024;
    // A polled task has a budget that ends; a thread that may block has none.
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..MORE_THAN_A_TURN {
        match coop::poll_proceed(&mut context) {
            Poll::Ready(proceed) => proceed.made_progress(),
            Poll::Pending => return true,
        }
    }
    // Unless it has been released from it (`unconstrained`): a scheduler then keeps what gives way, while without one it is woken at once.
    let wake_flag = Arc::new(WakeFlag::default());
    let waker = Waker::from(wake_flag.clone());
    let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
    !wake_flag.0.load(Ordering::Acquire)
}

/// Notes that it was woken.
#[derive(Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// A runtime driven by the threads that wait in it, else by a thread of its own.
pub struct Driver {
    inner: Arc<Inner>,
}

struct Inner {
    /// `None` only while it is being dropped.
    runtime: Option<Runtime>,
    /// Threads inside.
    inside: AtomicUsize,
    /// The keeper drives.
    is_kept: AtomicBool,
    /// Ends the keeper's turn.
    end_turn: Notify,
    state: Mutex<State>,
    changed: Condvar,
    /// The keeper sleeps for longer than [`GRACE`].
    keeper_sleeps_long: AtomicBool,
    /// A thread that left while others stayed has left work behind.
    is_owed: AtomicBool,
}

struct State {
    /// When the last thread left, and how many times that has happened.
    left: Instant,
    departures: u64,
    stopped: bool,
}

impl Driver {
    /// Starts the keeper, a thread of this name.
    ///
    /// # Errors
    /// [`Error::Io`] when the system gives no thread or no descriptors.
    pub fn new(name: &str) -> Result<Self> {
        let failed = |error| Error::io(format!("starting the runtime of {name}"), error);
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(1)
            .thread_keep_alive(Duration::from_millis(10))
            .thread_name(name)
            .build()
            .map_err(failed)?;
        let inner = Arc::new(Inner {
            runtime: Some(runtime),
            inside: AtomicUsize::new(0),
            is_kept: AtomicBool::new(false),
            end_turn: Notify::new(),
            state: Mutex::new(State { left: Instant::now(), departures: 0, stopped: false }),
            changed: Condvar::new(),
            keeper_sleeps_long: AtomicBool::new(false),
            is_owed: AtomicBool::new(false),
        });
        let keeper = inner.clone();
        thread::Builder::new().name(name.to_string()).spawn(move || keeper.keep()).map_err(failed)?;
        Ok(Driver { inner })
    }

    /// For what has to be made within the runtime's context.
    ///
    /// # Errors
    /// [`Error::Internal`] while it is being dropped.
    pub fn handle(&self) -> Result<&Handle> {
        self.inner.runtime().map(Runtime::handle)
    }

    /// Runs `future` in this thread. Any number of threads may be inside at once; one of them drives for all.
    ///
    /// # Errors
    /// The future's; `InvalidArgument` from within an asynchronous task, where waiting would stop the task's own runtime.
    pub fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        may_block()?;
        let guard = DriverGuard::enter(&self.inner, false);
        let outcome = self.inner.runtime()?.block_on(future);
        drop(guard);
        outcome
    }

    /// Runs `future` in this thread until it is ready, waiting as `spinner` says; `None` at the deadline. The tasks that it has
    /// woken get a turn before this returns. `leaves_work` says that they may need more than that, so that the keeper takes over
    /// soon even if it sleeps.
    ///
    /// # Errors
    /// As [`block_on`](Driver::block_on).
    pub fn run<T>(
        &self,
        spinner: &mut Spinner,
        deadline: Deadline,
        leaves_work: bool,
        future: impl Future<Output = Result<T>>,
    ) -> Result<Option<T>> {
        may_block()?;
        let runtime = self.inner.runtime()?;
        let guard = DriverGuard::enter(&self.inner, leaves_work);
        let outcome = runtime.block_on(async {
            let mut future = pin!(future);
            let outcome = bounded(spinner, deadline, |cx| future.as_mut().poll(cx)).await;
            tokio::task::yield_now().await;
            outcome
        });
        drop(guard);
        outcome.transpose()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner).stopped = true;
        self.inner.changed.notify_all();
        self.inner.end_turn.notify_one();
    }
}

/// Ends when `deadline` has passed. A timer that was set before this process was stopped would end too early.
pub async fn passed(deadline: Deadline) {
    while !deadline.has_passed() {
        tokio::time::sleep_until(deadline.instant().into()).await;
    }
}

/// The output of `future`; `None` at the deadline.
pub async fn within<T>(deadline: Deadline, future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        value = future => Some(value),
        () = passed(deadline) => None,
    }
}

/// Polls until ready or until the deadline.
async fn bounded<T>(
    spinner: &mut Spinner,
    deadline: Deadline,
    mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Option<T> {
    let mut wait = spinner.wait();
    // Made when the thread is about to sleep for the first time: most exchanges never do.
    let mut expired = None;
    poll_fn(|cx| {
        if let Poll::Ready(value) = poll(cx) {
            return Poll::Ready(Some(value));
        }
        match wait.next(deadline) {
            Next::Look => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Next::Expired => Poll::Ready(None),
            Next::Park => {
                let expired = expired.get_or_insert_with(|| Box::pin(passed(deadline)));
                expired.as_mut().poll(cx).map(|()| None)
            }
        }
    })
    .await
}

/// A thread inside, until dropped.
struct DriverGuard<'a> {
    inner: &'a Inner,
    leaves_work: bool,
}

impl<'a> DriverGuard<'a> {
    fn enter(inner: &'a Inner, leaves_work: bool) -> Self {
        inner.inside.fetch_add(1, Ordering::SeqCst);
        if inner.is_kept.load(Ordering::SeqCst) {
            inner.end_turn.notify_one();
        }
        DriverGuard { inner, leaves_work }
    }
}

impl Drop for DriverGuard<'_> {
    fn drop(&mut self) {
        let inner = self.inner;
        if self.leaves_work {
            inner.is_owed.store(true, Ordering::SeqCst);
        }
        if inner.inside.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        let mut state = inner.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left = Instant::now();
        state.departures += 1;
        drop(state);
        // A call to the kernel, so only where it may matter.
        if inner.is_owed.swap(false, Ordering::SeqCst) && inner.keeper_sleeps_long.load(Ordering::SeqCst) {
            inner.changed.notify_one();
        }
    }
}

impl Inner {
    fn runtime(&self) -> Result<&Runtime> {
        self.runtime.as_ref().ok_or_else(|| Error::Internal("a runtime is used while it is dropped".into()))
    }

    fn keep(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = state.departures;
        let mut sleep = GRACE;
        while !state.stopped {
            let quiet = state.left.elapsed();
            if self.inside.load(Ordering::SeqCst) > 0 {
                // The longer the same call takes, the longer it is left alone.
                sleep = if state.departures == seen { LONGEST_SLEEP.min(2 * sleep) } else { GRACE };
                seen = state.departures;
                self.keeper_sleeps_long.store(sleep > GRACE, Ordering::SeqCst);
                state = self.changed.wait_timeout(state, sleep).unwrap_or_else(PoisonError::into_inner).0;
                self.keeper_sleeps_long.store(false, Ordering::SeqCst);
            } else if quiet < GRACE {
                state = self.changed.wait_timeout(state, GRACE - quiet).unwrap_or_else(PoisonError::into_inner).0;
            } else {
                drop(state);
                self.is_kept.store(true, Ordering::SeqCst);
                // A thread that entered before that has not woken it.
                if self.inside.load(Ordering::SeqCst) == 0
                    && let Ok(runtime) = self.runtime()
                {
                    runtime.block_on(self.end_turn.notified());
                }
                self.is_kept.store(false, Ordering::SeqCst);
                sleep = GRACE;
                state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits for nothing, so that it may happen anywhere.
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::waiting::Waiting;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    fn io<T>(result: std::io::Result<T>) -> Result<T> {
        result.map_err(|error| Error::io("test", error))
    }

    #[test]
    fn tasks_go_on_while_nobody_is_inside() {
        let driver = Driver::new("test").unwrap();
        let (sender, receiver) = mpsc::channel();
        driver
            .block_on(async {
                tokio::spawn(async move {
                    for round in 0..3 {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        sender.send(round).unwrap();
                    }
                });
                Ok(())
            })
            .unwrap();
        for round in 0..3 {
            assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok(round));
        }
    }

    #[test]
    fn messages_go_to_and_fro_in_every_way_of_waiting() {
        for waiting in Waiting::ALL {
            let server = Driver::new("server").unwrap();
            let listener = server.block_on(async { io(TcpListener::bind("127.0.0.1:0").await) }).unwrap();
            let address = listener.local_addr().unwrap();
            let echo = thread::spawn(move || {
                let mut spinner = Spinner::new(waiting);
                let accepted = server.run(&mut spinner, soon(), false, async { io(listener.accept().await) });
                let (mut stream, _) = accepted.unwrap().unwrap();
                for _ in 0..200 {
                    let turn = async {
                        let mut byte = [0; 1];
                        io(stream.read_exact(&mut byte).await)?;
                        io(stream.write_all(&byte).await)
                    };
                    server.run(&mut spinner, soon(), false, turn).unwrap().unwrap();
                }
            });
            let client = Driver::new("client").unwrap();
            let mut spinner = Spinner::new(waiting);
            let mut stream = client.block_on(async { io(TcpStream::connect(address).await) }).unwrap();
            for round in 0..200u8 {
                let turn = async {
                    io(stream.write_all(&[round]).await)?;
                    let mut byte = [0; 1];
                    io(stream.read_exact(&mut byte).await)?;
                    Ok(byte[0])
                };
                assert_eq!(client.run(&mut spinner, soon(), false, turn).unwrap(), Some(round));
                if round % 50 == 0 {
                    // Long enough for the keeper to come and to be sent away again.
                    thread::sleep(Duration::from_millis(2));
                }
            }
            echo.join().unwrap();
        }
    }

    #[test]
    fn the_deadline_ends_a_wait_of_every_kind() {
        for waiting in Waiting::ALL {
            let driver = Driver::new("test").unwrap();
            let began = Instant::now();
            let never = std::future::pending::<Result<()>>();
            let deadline = Deadline::after(Duration::from_millis(30));
            assert_eq!(driver.run(&mut Spinner::new(waiting), deadline, false, never).unwrap(), None);
            assert!((30..5000).contains(&began.elapsed().as_millis()), "{waiting}: {:?}", began.elapsed());
        }
    }

    #[test]
    fn several_threads_may_be_inside() {
        let driver = Driver::new("test").unwrap();
        thread::scope(|scope| {
            for millis in 1..9 {
                let driver = &driver;
                scope.spawn(move || {
                    for _ in 0..20 {
                        let sleep = async {
                            tokio::time::sleep(Duration::from_millis(millis)).await;
                            Ok(millis)
                        };
                        let slept = driver.run(&mut Spinner::new(Waiting::Adaptive), soon(), millis % 2 == 0, sleep);
                        assert_eq!(slept.unwrap(), Some(millis));
                    }
                });
            }
        });
    }

    fn runtimes() -> [Runtime; 2] {
        [Builder::new_current_thread().build().unwrap(), Builder::new_multi_thread().worker_threads(2).build().unwrap()]
    }

    /// A blocking call that does something.
    fn call() -> Result<u32> {
        Driver::new("test")?.block_on(async {
            tokio::task::yield_now().await;
            Ok(7)
        })
    }

    #[test]
    fn threads_that_may_block_are_let_through() {
        assert_eq!(call().unwrap(), 7);
        for runtime in runtimes() {
            assert_eq!(runtime.block_on(async { tokio::task::spawn_blocking(call).await.unwrap() }).unwrap(), 7);
            let _guard = runtime.enter();
            assert_eq!(call().unwrap(), 7);
        }
        let [_, workers] = runtimes();
        let task = workers.spawn(async { tokio::task::block_in_place(call) });
        assert_eq!(workers.block_on(task).unwrap().unwrap(), 7);
        assert_eq!(workers.block_on(async { tokio::task::block_in_place(call) }).unwrap(), 7);
    }

    #[test]
    fn threads_that_poll_tasks_are_refused() {
        let refused = |outcome: Result<u32>| {
            let error = outcome.unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument(_)) && error.to_string().contains("spawn_blocking"),
                "{error}"
            );
        };
        for runtime in runtimes() {
            refused(runtime.block_on(async { call() }));
            refused(runtime.block_on(async { tokio::spawn(async { call() }).await.unwrap() }));
            // Again in the same turn of the same task, which has nothing left of its budget.
            refused(runtime.block_on(async { call().and_then(|_| call()) }));
            refused(runtime.block_on(async { call().or_else(|_| call()) }));
            refused(runtime.block_on(async { tokio::spawn(coop::unconstrained(async { call() })).await.unwrap() }));
            let local = tokio::task::LocalSet::new();
            refused(local.block_on(&runtime, async { tokio::task::spawn_local(async { call() }).await.unwrap() }));
            // The runtime goes on.
            assert_eq!(runtime.block_on(async { tokio::spawn(async { 5 }).await.unwrap() }), 5);
        }
    }

    #[test]
    fn it_refuses_to_block_a_task_and_may_be_dropped_in_one() {
        let outer = Builder::new_current_thread().build().unwrap();
        outer.block_on(async {
            let driver = Driver::new("test").unwrap();
            assert!(matches!(driver.block_on(async { Ok(()) }), Err(Error::InvalidArgument(_))));
            drop(driver);
        });
    }
}
