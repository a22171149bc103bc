//! Letting in those who prove that they belong to the job, and nobody else.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use comm_core::Deadline;
use comm_core::driver::within;
use tokio::net::{TcpListener, TcpStream};

/// A connection that has not proven itself by then is closed.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be proving themselves at the same time. With one more the oldest is closed, so that silent strangers
/// cannot keep the others out; a rank turned away that way dials again.
const CROWD: usize = 256;

/// A public listener. Nothing that comes through it is believed before its handshake has succeeded, and what strangers can
/// cost is bounded: [`CROWD`] sockets for [`PATIENCE`].
pub(crate) struct Door<'a, T> {
    listener: TcpListener,
    handshakes: VecDeque<Handshake<'a, T>>,
}

type Handshake<'a, T> = Pin<Box<dyn Future<Output = Option<T>> + Send + 'a>>;

impl<'a, T: Send + 'a> Door<'a, T> {
    pub(crate) fn open(listener: TcpListener) -> Self {
        Door { listener, handshakes: VecDeque::new() }
    }

    /// The next connection whose `handshake` gave `Some`. A handshake that gives `None` was a stranger's.
    pub(crate) async fn admit<F>(&mut self, handshake: impl Fn(TcpStream) -> F) -> T
    where
        F: Future<Output = Option<T>> + Send + 'a,
    {
        loop {
            let admitted = std::future::poll_fn(|cx| {
                while let Poll::Ready(accepted) = self.listener.poll_accept(cx) {
                    let Ok((stream, _)) = accepted else {
                        // Out of descriptors, or the stranger is gone already: go on after a moment, with one descriptor more.
                        self.handshakes.pop_front();
                        return Poll::Ready(None);
                    };
                    if self.handshakes.len() == CROWD {
                        self.handshakes.pop_front();
                    }
                    let handshake = handshake(stream);
                    self.handshakes.push_back(Box::pin(async move {
                        within(Deadline::after(PATIENCE), handshake).await.flatten()
                    }));
                }
                let mut index = 0;
                while let Some(handshake) = self.handshakes.get_mut(index) {
                    match handshake.as_mut().poll(cx) {
                        Poll::Pending => index += 1,
                        Poll::Ready(outcome) => {
                            self.handshakes.remove(index);
                            if outcome.is_some() {
                                return Poll::Ready(outcome);
                            }
                        }
                    }
                }
                Poll::Pending
            })
            .await;
            match admitted {
                Some(admitted) => return admitted,
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
}
