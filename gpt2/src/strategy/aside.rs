//! A thread beside the training thread, for what has to happen between the operations of a step.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use comm_core::{Error, Result};

use super::channels::Channel;
use crate::memory::{self, Copies};
use crate::record::{self, Ended};

/// What it is to do: results go to whoever asks for the [`next`](Aside::next).
type Job<S, T> = Box<dyn FnOnce(&mut S) -> Result<Vec<T>> + Send>;

/// A thread that does one thing after another on its own `S`, so that all ranks start their operations in one order. It may wait for
/// operations, which are the step's as if the training thread had waited.
///
/// What it waits for has deadlines, and ends with an error when the job fails; then it does nothing more. It ends after its last job once this
/// is dropped, which does not wait for it. Where the training thread drops it in a panic, the job ends: what this thread has of the communicator
/// would keep the other ranks waiting until their deadlines.
pub(super) struct Aside<S, T> {
    channel: Channel,
    jobs: Sender<Job<S, T>>,
    events: Receiver<Event<T>>,
}

enum Event<T> {
    /// It has waited for an operation.
    Waited(Ended),
    /// It has copied so much.
    Copied(Copies),
    Result(T),
    Failed(Error),
}

impl<S: Send + 'static, T: Send + 'static> Aside<S, T> {
    /// Starts the thread, called `name`, which works on `channel`'s communicator.
    ///
    /// # Errors
    /// `Io` where the system gives none.
    pub(super) fn start(name: &str, channel: &Channel, mut state: S) -> Result<Self> {
        let (jobs, to_do) = mpsc::channel::<Job<S, T>>();
        let (sender, events) = mpsc::channel();
        let work = move || {
            let listener = sender.clone();
            // Nobody listens any more where the run has ended with an error.
            record::tell(move |ended| drop(listener.send(Event::Waited(ended))));
            for job in to_do {
                let before = memory::copies();
                let outcome = job(&mut state);
                let _ = sender.send(Event::Copied(memory::copies().since(before)));
                let told = match outcome {
                    Ok(results) => results.into_iter().try_for_each(|result| sender.send(Event::Result(result))),
                    Err(error) => return drop(sender.send(Event::Failed(error))),
                };
                if told.is_err() {
                    return;
                }
            }
        };
        let started = thread::Builder::new().name(name.into()).spawn(work);
        started.map_err(|error| Error::io(format!("starting the thread {name}"), error))?;
        Ok(Aside { channel: channel.clone(), jobs, events })
    }

    /// Has it do this after all that it was told before.
    pub(super) fn run(&self, job: impl FnOnce(&mut S) -> Result<Vec<T>> + Send + 'static) {
        // Where it has ended, whoever waits for a result learns why.
        let _ = self.jobs.send(Box::new(job));
    }

    /// Waits for its next result.
    ///
    /// # Errors
    /// The first of a job.
    pub(super) fn next(&self) -> Result<T> {
        loop {
            let result = record::waited_elsewhere(|| match self.events.recv() {
                Ok(Event::Waited(ended)) => (None, Some(ended)),
                Ok(Event::Copied(copies)) => {
                    memory::also_copied(copies);
                    (None, None)
                }
                Ok(Event::Result(result)) => (Some(Ok(result)), None),
                Ok(Event::Failed(error)) => (Some(Err(error)), None),
                Err(_) => {
                    let ended = "the thread beside the training thread has ended; its message is above";
                    (Some(Err(Error::Internal(ended.into()))), None)
                }
            });
            if let Some(result) = result {
                return result;
            }
        }
    }
}

impl<S, T> Drop for Aside<S, T> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.channel.abort("the training thread has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use isocomm::{TransportOptions, threads};

    use super::super::channels::Route;
    use super::*;
    use crate::flat::Packer;
    use crate::memory::Category;
    use crate::precision::Precision;

    /// Channels of some ranks that are threads.
    fn channels(ranks: usize) -> Vec<Channel> {
        let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
        let channel =
            |comm| Channel::new(comm, record::EVERYONE, Packer::new(Precision::F32, None), Category::Gradients);
        threads(ranks, &options).unwrap().into_iter().map(|rank| channel(rank.comm)).collect()
    }

    #[test]
    fn jobs_run_in_order_on_one_state() {
        let aside = Aside::start("adds", &channels(1)[0], 0).unwrap();
        for number in 1..=3 {
            aside.run(move |sum| {
                *sum += number;
                Ok(vec![*sum; number])
            });
        }
        let results: Vec<usize> = (0..6).map(|_| aside.next().unwrap()).collect();
        assert_eq!(results, [1, 3, 3, 6, 6, 6]);
    }

    #[test]
    fn the_first_error_is_the_last_result() {
        let channel = &channels(1)[0];
        let aside = Aside::start("fails", channel, ()).unwrap();
        aside.run(|()| Ok(vec![1]));
        aside.run(|()| Err(Error::invalid("no more")));
        aside.run(|()| Ok(vec![2]));
        assert_eq!(aside.next().unwrap(), 1);
        assert!(aside.next().unwrap_err().to_string().contains("no more"));
        assert!(matches!(aside.next(), Err(Error::Internal(_))));
        aside.run(|()| Ok(vec![3]));
        let aside = Aside::<(), ()>::start("panics", channel, ()).unwrap();
        aside.run(|()| panic!("on purpose"));
        assert!(matches!(aside.next(), Err(Error::Internal(_))));
    }

    #[test]
    fn a_panic_beside_it_ends_the_job() {
        let mut ranks = channels(2);
        let (other, own) = (ranks.remove(1), ranks.remove(0));
        let panics = thread::spawn(move || {
            let aside = Aside::<Channel, ()>::start("waits", &own, own.clone()).unwrap();
            // For what never comes.
            aside.run(|channel| channel.receive(1, 1, Route::lane("nothing", 0))?.wait().map(|_| Vec::new()));
            panic!("on purpose");
        });
        let error = other.receive(0, 1, Route::lane("nothing", 1)).unwrap().wait().unwrap_err();
        assert!(matches!(&error, Error::Aborted { by: 0, reason } if reason.contains("panicked")), "{error}");
        assert!(panics.join().is_err());
    }
}
