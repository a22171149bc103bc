//! QUIC's timers on the clock of deadlines, which stands still while this process does.
//!
//! By the system's clock a process that was stopped for longer than the idle timeout would close all its connections on waking,
//! whose other ends may have been stopped with it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use comm_core::clock;
use quinn::{AsyncTimer, AsyncUdpSocket, Runtime, TokioRuntime};
use tokio::time::{Sleep, sleep_until};

/// Tokio's runtime with this clock. All its instants are the first one and what this process has run since.
#[derive(Debug)]
pub(crate) struct RunningTime;

impl Runtime for RunningTime {
    fn new_timer(&self, due: Instant) -> Pin<Box<dyn AsyncTimer>> {
        Box::pin(Timer { due, sleep: Box::pin(sleep_until(on_the_wall(due))) })
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        TokioRuntime.spawn(future);
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        TokioRuntime.wrap_udp_socket(socket)
    }

    fn now(&self) -> Instant {
        now()
    }
}

#[derive(Debug)]
struct Timer {
    due: Instant,
    sleep: Pin<Box<Sleep>>,
}

impl AsyncTimer for Timer {
    fn reset(mut self: Pin<&mut Self>, due: Instant) {
        self.due = due;
        self.sleep.as_mut().reset(on_the_wall(due));
    }

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        while now() < self.due {
            ready!(Future::poll(self.sleep.as_mut(), context));
            // Not yet due if this process was stopped meanwhile.
            let again = on_the_wall(self.due);
            self.sleep.as_mut().reset(again);
        }
        Poll::Ready(())
    }
}

fn now() -> Instant {
    static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
    *FIRST + clock::running()
}

/// When it is `due` by the system's clock, if this process runs until then.
fn on_the_wall(due: Instant) -> tokio::time::Instant {
    tokio::time::Instant::now() + due.saturating_duration_since(now())
}
