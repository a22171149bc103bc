//! Letting in those who prove that they belong to the job, and nobody else.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use comm_core::Deadline;
use comm_core::descriptors::ran_out;
use comm_core::driver::within;
use tokio::net::{TcpListener, TcpStream};

/// A connection that has not proven itself by then is closed.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be proving themselves at the same time. With one more the oldest is closed, so that silent strangers
/// cannot keep the others out; a rank turned away that way dials again.
const CROWD: usize = 256;
/// Most connections accepted before those that are there get their turn: a rank must get through its handshake in the time that
/// others take to fill the room. It also leaves the rest of what a task of the runtime may do at a time to the handshakes.
const ACCEPT_TURN: usize = 32;

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
    ///
    /// # Errors
    /// The system's, when there are no descriptors left and nobody is there who could be turned away for one.
    pub(crate) async fn admit<F>(&mut self, handshake: impl Fn(TcpStream) -> F) -> io::Result<T>
    where
        F: Future<Output = Option<T>> + Send + 'a,
    {
        loop {
            let admitted = std::future::poll_fn(|cx| {
                let mut came = 0;
                while came < ACCEPT_TURN
                    && let Poll::Ready(accepted) = self.listener.poll_accept(cx)
                {
                    came += 1;
                    let stream = match accepted {
                        Ok((stream, _)) => stream,
                        // Out of descriptors, or the stranger is gone already: go on after a moment, with one descriptor more.
                        Err(error) => {
                            let is_hopeless = ran_out(&error) && self.handshakes.is_empty();
                            self.handshakes.pop_front();
                            return Poll::Ready(if is_hopeless { Err(error) } else { Ok(None) });
                        }
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
                                return Poll::Ready(Ok(outcome));
                            }
                        }
                    }
                }
                if came == ACCEPT_TURN {
                    // More may be waiting, and nothing else says so.
                    cx.waker().wake_by_ref();
                }
                Poll::Pending
            })
            .await?;
            match admitted {
                Some(admitted) => return Ok(admitted),
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tokio::io::AsyncReadExt;

    use super::*;

    /// Who was first and has said everything is let in, however many others have come before anybody looked.
    #[tokio::test]
    async fn a_flood_at_the_door_turns_no_rank_away() {
        let listener = crate::socket::listen("127.0.0.1:0".parse().unwrap(), None).unwrap();
        let address = listener.local_addr().unwrap();
        let dial = || std::net::TcpStream::connect(address).unwrap();
        let mut rank = dial();
        rank.write_all(b"rank").unwrap();
        // All in the backlog.
        let _silent: Vec<_> = (0..CROWD + 64).map(|_| dial()).collect();
        let mut door = Door::open(TcpListener::from_std(listener).unwrap());
        let admitted = door.admit(|mut stream| async move {
            let mut said = [0; 4];
            stream.read_exact(&mut said).await.ok()?;
            Some(said)
        });
        let admitted = tokio::time::timeout(Duration::from_secs(30), admitted).await.expect("it was turned away");
        assert_eq!(admitted.unwrap(), *b"rank");
    }
}
