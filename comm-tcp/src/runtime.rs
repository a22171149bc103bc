//! Running many things at once in one task.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use comm_core::{Control, Error, Result};
use tokio::runtime::{Builder, Runtime};

/// Waits for `future` while the job lives: its failure ends the wait, and so does `own_error`. Used while connecting, when nobody can
/// abort yet.
pub(crate) async fn unless_failed<T>(
    control: &dyn Control,
    own_error: &dyn Fn() -> Option<Error>,
    future: impl Future<Output = Result<T>>,
) -> Result<T> {
    let mut future = pin!(future);
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    std::future::poll_fn(|cx| {
        if let Poll::Ready(result) = future.as_mut().poll(cx) {
            return Poll::Ready(result);
        }
        while tick.poll_tick(cx).is_ready() {
            // Not one that may still turn out to be another's.
            if let Some(error) = own_error().or_else(|| control.failure().and_then(|_| control.settled_failure())) {
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

    /// Adds so many parts, `at_once`, that together do the `work` on all `items`, in order; they wait for `rank`, this one. What one waits for does
    /// not hold up the others, and of thousands of items few are under way.
    pub(crate) fn share<T: 'a, F: Future<Output = Result<()>> + 'a>(
        &mut self,
        rank: usize,
        at_once: usize,
        items: impl Iterator<Item = T> + 'a,
        work: impl Fn(T) -> F + 'a,
    ) {
        let shared = Rc::new((RefCell::new(items), work));
        for _ in 0..at_once {
            let shared = shared.clone();
            self.push(rank, async move {
                let next = || shared.0.borrow_mut().next();
                while let Some(item) = next() {
                    (shared.1)(item).await?;
                }
                Ok(())
            });
        }
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

/// A runtime in the caller's thread, without one of its own.
pub(crate) fn temporary(rank: usize) -> Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::io(format!("rank {rank}: starting a runtime to connect with"), error))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

    use std::cell::Cell;
    use std::future::{pending, ready};
    use std::time::Instant;

    use comm_core::local;

    use super::*;

    /// The outcome of a wait that would not end by itself, on rank 0 of two, and how long it took.
    fn wait(own_error: &dyn Fn() -> Option<Error>, reported: Option<&Error>) -> (Error, Duration) {
        let group = local::group(2, 1);
        if let Some(error) = reported {
            group[1].control.poison(error);
        }
        let began = Instant::now();
        let waiting = unless_failed(&*group[0].control, own_error, pending::<Result<()>>());
        let bounded = async { tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap() };
        (temporary(0).unwrap().block_on(bounded).unwrap_err(), began.elapsed())
    }

    #[test]
    fn the_failure_of_the_job_ends_a_wait() {
        let (error, took) = wait(&|| None, Some(&Error::Aborted { by: 1, reason: "enough".into() }));
        assert!(matches!(&error, Error::Aborted { by: 1, reason } if reason == "enough"), "{error}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }

    #[test]
    fn an_own_error_ends_a_wait_however_late_it_comes() {
        let looked = Cell::new(0);
        let own_error = || {
            looked.set(looked.get() + 1);
            (looked.get() == 5).then(|| Error::invalid("a stranger"))
        };
        let (error, took) = wait(&own_error, None);
        assert!(error.to_string().contains("a stranger") && looked.get() == 5, "{error}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }

    #[test]
    fn work_is_shared_by_so_many_parts_and_one_that_waits_holds_up_no_other() {
        let (under_way, most, done) = (Cell::new(0), Cell::new(0), RefCell::new(Vec::new()));
        let mut join = Join::default();
        join.share(0, 3, 0..100, |item| {
            let (under_way, most, done) = (&under_way, &most, &done);
            async move {
                under_way.set(under_way.get() + 1);
                most.set(under_way.get().max(most.get()));
                give_way().await;
                while item == 7 && done.borrow().len() < 99 {
                    give_way().await;
                }
                under_way.set(under_way.get() - 1);
                done.borrow_mut().push(item);
                Ok(())
            }
        });
        let bounded = async { tokio::time::timeout(Duration::from_secs(20), join).await.unwrap() };
        temporary(0).unwrap().block_on(bounded).unwrap();
        assert_eq!((most.get(), under_way.get()), (3, 0));
        let mut done = done.into_inner();
        assert_eq!(done.pop(), Some(7));
        done.sort_unstable();
        assert!(done.into_iter().eq((0..100).filter(|item| *item != 7)));

        let mut join = Join::default();
        join.share(0, 3, 0..100, |item| ready(if item == 50 { Err(Error::invalid("50")) } else { Ok(()) }));
        assert_eq!(temporary(0).unwrap().block_on(join).unwrap_err().to_string(), "50");
    }

    #[test]
    fn what_is_ready_is_not_held_up() {
        let group = local::group(1, 1);
        let own_error = || Some(Error::invalid("never asked"));
        let done = unless_failed(&*group[0].control, &own_error, ready(Ok(7)));
        assert_eq!(temporary(0).unwrap().block_on(done).unwrap(), 7);
    }
}
