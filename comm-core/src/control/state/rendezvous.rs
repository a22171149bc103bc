//! How ranks come in, and how the job starts.

use std::sync::Arc;
use std::time::Duration;

use super::{State, not, set};
use crate::clock;
use crate::control::acceptor::RejectedConnection;
use crate::control::auth::{Hello, Rejection, fresh_session};
use crate::control::send_half::SendHalf;
use crate::control::wire::Message;
use crate::error::Error;

/// How long a rendezvous that has gone wrong waits for the ranks that are still to come, to tell them too.
const TELL: Duration = Duration::from_secs(2);

/// What rank 0 does with a connection that has passed the handshake.
pub(in crate::control) enum Admission {
    /// Its messages are those of this rank.
    Admitted(usize),
    /// It has been told why not.
    Refused,
}

impl State {
    pub(in crate::control) fn session(&self) -> Option<&[u8; 32]> {
        self.session.as_ref()
    }

    /// At rank 0: what the rendezvous fails with, once everyone who can be told is there or has had time to come.
    pub(in crate::control) fn due_rendezvous_error(&self) -> Option<Error> {
        let (error, until) = self.rendezvous_error.as_ref()?;
        let all_there = (1..self.world_size).all(|rank| self.send_half(rank).is_some());
        (all_there || clock::running() >= *until).then(|| error.clone())
    }

    /// When [`due_rendezvous_error`](State::due_rendezvous_error) has something at the latest.
    pub(in crate::control) fn rendezvous_error_due_at(&self) -> Option<Duration> {
        self.rendezvous_error.as_ref().map(|(_, until)| *until)
    }

    /// Notes a connection that was not admitted. A start of the job that is still waiting for its ranks when one of a later start comes is
    /// over: its own have gone.
    pub(in crate::control) fn note_rejected(&mut self, connection: &RejectedConnection) {
        self.rejected.note(connection);
        if let Rejection::Later(why) = &connection.why
            && self.session.is_none()
        {
            self.fail_rendezvous(why);
        }
    }

    /// For an error's text: what came instead of the ranks that are missing.
    pub(in crate::control) fn rejected(&self) -> String {
        self.rejected.to_string()
    }

    /// At rank 0: takes `send_half`, whose other end knows the secret and says `hello`, into the job, or tells it why not.
    pub(in crate::control) fn admit(&mut self, send_half: Arc<SendHalf>, hello: &Hello) -> Admission {
        let rank = hello.rank as usize;
        let why = if hello.job != self.job_id {
            Some(format!("rank {rank} belongs to job {:?}, but this is job {:?}", hello.job, self.job_id))
        } else if hello.epoch != self.epoch {
            Some(format!("rank {rank} has epoch {}, but this job has epoch {}", hello.epoch, self.epoch))
        } else if let Some(error) = &self.decided {
            Some(format!("rank {rank} connected after the job had failed: {error}"))
        } else if hello.world_size as usize != self.world_size {
            let why =
                format!("rank {rank} was started for {} ranks, and rank 0 for {}", hello.world_size, self.world_size);
            self.fail_rendezvous(&why);
            Some(why)
        } else if rank == 0 || rank >= self.world_size || self.send_half(rank).is_some() {
            let why = format!("there are two processes with rank {rank}");
            // It does no harm to a running job.
            if self.session.is_none() {
                self.fail_rendezvous(&why);
            }
            Some(why)
        } else {
            None
        };
        if let Some(why) = why {
            self.rejected.note_refusal(&send_half, &why);
            send_half.send(&Message::Refused { why });
            send_half.finish();
            return Admission::Refused;
        }
        if let Some(slot) = self.send_halves.get_mut(rank) {
            *slot = Some(send_half);
        }
        Admission::Admitted(rank)
    }

    /// At rank 0: everyone who has not sent its settings yet.
    pub(in crate::control) fn missing(&self) -> Vec<usize> {
        not(&self.joined)
    }

    pub(super) fn join(&mut self, rank: usize, config: &[(String, String)]) {
        set(&mut self.joined, rank);
        if let Some(why) = difference(&self.config, config, rank) {
            self.fail_rendezvous(&why);
        }
        self.start_if_complete();
    }

    /// At rank 0: starts the job when all ranks are there and agree.
    pub(in crate::control) fn start_if_complete(&mut self) {
        if self.session.is_some()
            || self.rendezvous_error.is_some()
            || self.decided.is_some()
            || !self.missing().is_empty()
        {
            return;
        }
        match fresh_session() {
            Ok(session) => {
                self.session = Some(session);
                self.broadcast(&Message::Start { session });
            }
            Err(error) => self.fail(&error),
        }
    }

    fn fail_rendezvous(&mut self, why: &str) {
        if self.rendezvous_error.is_none() {
            self.rendezvous_error = Some((Error::Rendezvous(why.to_string()), clock::running() + TELL));
        }
    }
}

/// The first item in which `theirs`, of `rank`, differs from `ours`, of rank 0.
fn difference(ours: &[(String, String)], theirs: &[(String, String)], rank: usize) -> Option<String> {
    let find = |items: &[(String, String)], name: &str| items.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let names = ours.iter().chain(theirs).map(|(name, _)| name);
    for name in names {
        match (find(ours, name), find(theirs, name)) {
            (Some(a), Some(b)) if a == b => {}
            (Some(a), Some(b)) => return Some(format!("rank {rank} has {name} = {b}, rank 0 has {name} = {a}")),
            (Some(a), None) => return Some(format!("rank {rank} has no {name}, rank 0 has {name} = {a}")),
            (None, Some(b)) => return Some(format!("rank {rank} has {name} = {b}, rank 0 has no {name}")),
            (None, None) => {}
        }
    }
    None
}
