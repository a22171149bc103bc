//! Accepts connections, and admits those whose handshake proves that they belong to the job.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use comm_core::Deadline;
use comm_core::descriptors::ran_out;
use comm_core::driver::within;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};

/// A connection that has not authenticated by then is closed.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most handshakes at a time. One more closes the oldest, so that silent connections cannot keep ranks out; a rank whose connection was
/// closed that way dials again.
const MAX_HANDSHAKES: usize = 256;
/// Most connections accepted before the handshakes under way are served: a rank must get through its handshake in the time that others
/// take to reach the limit. It also leaves the rest of what a task of the runtime may do at a time to the handshakes.
const ACCEPT_TURN: usize = 32;

/// While the process is out of descriptors, a connection whose handshake has taken this long is closed to free one. A rank needs far less
/// time; with a shorter one it would dial again and take the last descriptor again, for ever.
const GRACE: Duration = Duration::from_secs(1);
/// Until the next attempt to accept after one that failed.
const PAUSE: Duration = Duration::from_millis(10);

/// A public listener. Nothing that comes through it is trusted before its handshake has succeeded, and what connections from outside the
/// job can cost is bounded: [`MAX_HANDSHAKES`] sockets for [`HANDSHAKE_TIMEOUT`].
pub(crate) struct Acceptor<'a, T> {
    listener: TcpListener,
    handshakes: VecDeque<Handshake<'a, T>>,
    /// Nothing is accepted before it ends.
    pause: Option<Pin<Box<Sleep>>>,
}

struct Handshake<'a, T> {
    /// See [`GRACE`].
    grace: Deadline,
    proof: Pin<Box<dyn Future<Output = Option<T>> + Send + 'a>>,
}

impl<'a, T: Send + 'a> Acceptor<'a, T> {
    pub(crate) fn open(listener: TcpListener) -> Self {
        Acceptor { listener, handshakes: VecDeque::new(), pause: None }
    }

    /// The next connection whose `handshake` gave `Some`. A handshake that gives `None` failed, and its connection is closed.
    ///
    /// # Errors
    /// The system's, when the process is out of descriptors and no handshake holds one that could be freed.
    pub(crate) async fn admit<F>(&mut self, handshake: impl Fn(TcpStream) -> F) -> io::Result<T>
    where
        F: Future<Output = Option<T>> + Send + 'a,
    {
        std::future::poll_fn(|cx| {
            if let Err(error) = self.accept(cx, &handshake) {
                return Poll::Ready(Err(error));
            }
            let mut index = 0;
            while let Some(handshake) = self.handshakes.get_mut(index) {
                match handshake.proof.as_mut().poll(cx) {
                    Poll::Pending => index += 1,
                    Poll::Ready(outcome) => {
                        self.handshakes.remove(index);
                        if let Some(admitted) = outcome {
                            return Poll::Ready(Ok(admitted));
                        }
                    }
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Accepts waiting connections, at most [`ACCEPT_TURN`].
    fn accept<F>(&mut self, cx: &mut Context<'_>, handshake: impl Fn(TcpStream) -> F) -> io::Result<()>
    where
        F: Future<Output = Option<T>> + Send + 'a,
    {
        for _ in 0..ACCEPT_TURN {
            if let Some(pause) = &mut self.pause {
                if pause.as_mut().poll(cx).is_pending() {
                    return Ok(());
                }
                self.pause = None;
            }
            match self.listener.poll_accept(cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok((stream, _))) => {
                    if self.handshakes.len() == MAX_HANDSHAKES {
                        self.handshakes.pop_front();
                    }
                    let proof = within(Deadline::after(HANDSHAKE_TIMEOUT), handshake(stream));
                    let proof = Box::pin(async move { proof.await.flatten() });
                    self.handshakes.push_back(Handshake { grace: Deadline::after(GRACE), proof });
                }
                // The system says so even when no connection waits. Handshakes go on meanwhile.
                Poll::Ready(Err(error)) if ran_out(&error) => {
                    let Some(oldest) = self.handshakes.front() else { return Err(error) };
                    if oldest.grace.has_passed() {
                        self.handshakes.pop_front();
                    }
                    self.pause = Some(Box::pin(sleep(PAUSE)));
                }
                // The connection is gone already.
                Poll::Ready(Err(_)) => self.pause = Some(Box::pin(sleep(PAUSE))),
            }
        }
        // More may be waiting, and nothing else says so.
        cx.waker().wake_by_ref();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tokio::io::AsyncReadExt;

    use super::*;

    /// A connection that was first and has sent its handshake is admitted, however many others came before the handshakes were served.
    #[tokio::test]
    async fn a_flood_of_connections_turns_no_rank_away() {
        let listener = crate::socket::listen("127.0.0.1:0".parse().unwrap(), None, None).unwrap();
        let address = listener.local_addr().unwrap();
        let dial = || std::net::TcpStream::connect(address).unwrap();
        let mut rank = dial();
        rank.write_all(b"rank").unwrap();
        // All in the backlog.
        let _silent: Vec<_> = (0..MAX_HANDSHAKES + 64).map(|_| dial()).collect();
        let mut acceptor = Acceptor::open(TcpListener::from_std(listener).unwrap());
        let admitted = acceptor.admit(|mut stream| async move {
            let mut said = [0; 4];
            stream.read_exact(&mut said).await.ok()?;
            Some(said)
        });
        let admitted = tokio::time::timeout(Duration::from_secs(30), admitted).await.expect("it was turned away");
        assert_eq!(admitted.unwrap(), *b"rank");
    }

    /// With no descriptor left for another, which the system says although there is no other.
    #[test]
    fn who_comes_on_the_last_descriptor_is_let_in() {
        const NAME: &str = "acceptor::tests::who_comes_on_the_last_descriptor_is_let_in";
        const INSIDE: &str = "ACCEPTOR_TEST";
        if std::env::var(INSIDE).is_err() {
            let output = std::process::Command::new("sh")
                .args(["-c", "ulimit -n 64; exec \"$@\"", "sh"])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(INSIDE, NAME)
                .output()
                .unwrap();
            let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = crate::socket::listen("127.0.0.1:0".parse().unwrap(), None, None).unwrap();
        let mut rank = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut hoard: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        hoard.pop();
        // Its connection may not be closed meanwhile.
        let late = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            rank.write_all(b"rank").map(|()| rank)
        });
        let admitted = runtime.block_on(async {
            let mut acceptor = Acceptor::open(TcpListener::from_std(listener).unwrap());
            let admitted = acceptor.admit(|mut stream| async move {
                let mut said = [0; 4];
                stream.read_exact(&mut said).await.ok()?;
                Some(said)
            });
            tokio::time::timeout(Duration::from_secs(30), admitted).await
        });
        let admitted = admitted.expect("it was turned away").unwrap();
        assert_eq!(admitted, *b"rank");
        late.join().unwrap().unwrap();
    }
}
