//! One rank's state of the control plane, and how messages and events change it. Nothing here waits or reads.
//!
//! Rank 0 decides: the first failure that it sees or is told becomes the job's, and it tells all. A rank that reports a failure
//! holds it as provisional until rank 0's answer is there, and does not report it before: so all ranks end with the same error. Where
//! rank 0 is gone or does not answer, that is the job's failure, which every rank finds out by itself and words alike.
//!
//! Times are those of [`clock::running`](crate::clock::running).

mod failure;
mod gathering;
mod rendezvous;
mod stalls;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(super) use failure::rank_0_is_silent;
pub(super) use rendezvous::Admission;

use super::acceptor::RejectedConnections;
use super::send_half::SendHalf;
use super::stall::{Activity, LaneActivity, StallReport, abridged, within};
use super::wire::{Failure, Message, Wait};
use crate::clock;
use crate::error::{Error, Result};
use crate::job::Job;
use failure::Hook;
use gathering::Round;
use stalls::{StallHook, StallQuery};

pub(super) struct State {
    rank: usize,
    world_size: usize,
    job_id: String,
    epoch: u64,
    config: Vec<(String, String)>,
    /// The connections, by rank: at rank 0 those of all others, elsewhere only rank 0's.
    pub(super) send_halves: Vec<Option<Arc<SendHalf>>>,
    /// By rank, at rank 0: has sent its settings.
    joined: Vec<bool>,
    /// The randomness of this start, once all ranks are there.
    session: Option<[u8; 32]>,
    /// At rank 0: what is wrong with the rendezvous, and until when it waits for those who are to be told.
    rendezvous_error: Option<(Error, Duration)>,
    /// At rank 0: the connections that were not admitted.
    rejected: RejectedConnections,
    /// What this rank has reported to rank 0, and until when it waits for the answer.
    provisional: Option<(Error, Duration)>,
    /// At rank 0: what it was told in this turn of its event loop.
    reported: Vec<Failure>,
    decided: Option<Error>,
    hooks: Vec<Hook>,
    /// Number of gatherings this rank has begun.
    gatherings: u64,
    /// By rank, at rank 0: number of gatherings that rank has begun.
    peer_gatherings: Vec<u64>,
    rounds: BTreeMap<u64, Round>,
    /// Rank 0's answer to the last question.
    late: Option<(Wait, Vec<usize>)>,
    /// By rank: has said that it is done.
    leaving: Vec<bool>,
    all_left: bool,
    activities: Vec<Weak<dyn Activity>>,
    stall_hooks: Vec<StallHook>,
    /// At rank 0: the query that is under way, and what is to be looked at after it.
    query: Option<StallQuery>,
    stalled: VecDeque<(usize, LaneActivity)>,
    /// At rank 0: what has been looked at, so that not every rank of an operation causes a query of its own.
    queried: VecDeque<(LaneActivity, Duration)>,
    queries: u64,
    /// To be handed to the hooks.
    stall: Vec<StallReport>,
}

impl State {
    pub(super) fn new(job: &Job, config: Vec<(String, String)>) -> Self {
        let n = job.world_size;
        let mut state = State {
            rank: job.rank,
            world_size: n,
            job_id: job.id.clone(),
            epoch: job.epoch,
            config,
            send_halves: vec![None; n],
            joined: vec![false; n],
            session: None,
            rendezvous_error: None,
            rejected: RejectedConnections::default(),
            provisional: None,
            reported: Vec::new(),
            decided: None,
            hooks: Vec::new(),
            gatherings: 0,
            peer_gatherings: vec![0; n],
            rounds: BTreeMap::new(),
            late: None,
            leaving: vec![false; n],
            all_left: false,
            activities: Vec::new(),
            stall_hooks: Vec::new(),
            query: None,
            stalled: VecDeque::new(),
            queried: VecDeque::new(),
            queries: 0,
            stall: Vec::new(),
        };
        set(&mut state.joined, job.rank);
        state
    }

    // Leaving

    pub(super) fn begin_leave(&mut self) {
        if self.is_leaving() {
            return;
        }
        set(&mut self.leaving, self.rank);
        if self.rank == 0 {
            self.end_if_all_leave();
        } else if let Some(send_half) = self.send_half(0) {
            send_half.send(&Message::Leave);
        }
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.get(self.rank) == Some(&true)
    }

    pub(super) fn all_left(&self) -> bool {
        self.all_left
    }

    fn end_if_all_leave(&mut self) {
        if !self.all_left && self.leaving.iter().all(|&leaving| leaving) && self.decided.is_none() {
            self.all_left = true;
            self.broadcast(&Message::AllLeft);
        }
    }

    // Lateness

    /// Which ranks hold up `wait`, as far as this rank knows.
    pub(super) fn late(&self, wait: Wait) -> Vec<usize> {
        if self.rank == 0 {
            return match wait {
                Wait::Start => self.missing(),
                Wait::Gather(sequence) => match self.rounds.get(&sequence) {
                    Some(round) => (0..self.world_size).filter(|&r| matches!(round.blobs.get(r), Some(None))).collect(),
                    None => Vec::new(),
                },
                Wait::Leave => not(&self.leaving),
            };
        }
        match &self.late {
            Some((asked, ranks)) if *asked == wait => ranks.clone(),
            // Rank 0 has not even answered this.
            _ => vec![0],
        }
    }

    /// Asks rank 0 who holds up `wait`.
    pub(super) fn ask_who_is_late(&self, wait: Wait) {
        if let Some(send_half) = self.send_half(0) {
            send_half.send(&Message::WhoIsLate(wait));
        }
    }

    // Events

    /// Takes a message of `peer`.
    ///
    /// # Errors
    /// Describes a message that does not fit the state; the connection cannot be trusted any further.
    pub(super) fn on_message(&mut self, peer: usize, message: Message) -> Result<(), String> {
        if self.rank == 0 { self.on_message_up(peer, message) } else { self.on_message_down(message) }
    }

    fn on_message_up(&mut self, peer: usize, message: Message) -> Result<(), String> {
        match message {
            Message::Heartbeat => {}
            Message::Join { config } => self.join(peer, &config),
            Message::Gather { sequence, label, blob } => self.take_part(peer, sequence, (label, false), blob)?,
            Message::GatherAt0 { sequence, label, blob } => self.take_part(peer, sequence, (label, true), blob)?,
            Message::WhoIsLate(wait) => {
                let ranks = self.late(wait).into_iter().map(|rank| rank as u32).collect();
                if let Some(send_half) = self.send_half(peer) {
                    send_half.send(&Message::Late { wait, ranks });
                }
            }
            Message::Stalled(stalled) => self.begin_query(peer, within(stalled, self.world_size), clock::running()),
            Message::Doing { number, doing } => {
                if let Some(query) = self.query.as_mut().filter(|_| number == self.queries)
                    && let Some(answer) = query.answers.get_mut(peer)
                {
                    *answer = Some(abridged(doing));
                    self.end_query_if_complete();
                }
            }
            Message::Report(failure) => {
                // Two of a rank are all that can matter.
                if self.decided.is_none() && self.reported.len() < 2 * self.world_size {
                    self.reported.push(failure);
                }
            }
            Message::Leave => {
                set(&mut self.leaving, peer);
                self.end_if_all_leave();
            }
            other => return Err(format!("a message for ranks other than 0: {other:?}")),
        }
        Ok(())
    }

    fn on_message_down(&mut self, message: Message) -> Result<(), String> {
        match message {
            Message::Heartbeat => {}
            Message::Refused { why } => self.decide(Error::Rendezvous(why)),
            Message::Start { session } => self.session = Some(session),
            Message::Gathered { sequence, parts } => self.receive_gathered(sequence, parts)?,
            Message::Late { wait, ranks } => {
                self.late = Some((wait, ranks.into_iter().map(|rank| rank as usize).collect()));
            }
            Message::StallQuery { number } => {
                let doing = self.doing();
                if let Some(send_half) = self.send_half(0) {
                    send_half.send(&Message::Doing { number, doing });
                }
            }
            Message::Stall(report) => self.stall.push(report),
            Message::Failed(failure) => self.decide(failure.into_error()),
            Message::AllLeft => {
                self.all_left = true;
                if let Some(send_half) = self.send_half(0) {
                    send_half.finish();
                }
            }
            other => return Err(format!("a message for rank 0: {other:?}")),
        }
        Ok(())
    }

    /// The connection to `peer` has ended, or nothing was heard on it for too long.
    pub(super) fn on_lost(&mut self, peer: usize, lost: &Error) {
        let done = self.all_left || self.leaving.get(peer) == Some(&true);
        if done || self.decided.is_some() {
            return;
        }
        // With rank 0 goes the one who decides. Whatever this rank has reported to it, its end is what every rank sees.
        self.decide_alone(lost);
    }

    /// Bytes came that make no sense.
    pub(super) fn on_nonsense(&mut self, peer: usize, what: &str) {
        let error = Error::Protocol { who: format!("the control connection of rank {peer}"), what: what.to_string() };
        // Elsewhere than at rank 0 this is the connection to rank 0, whose word cannot come any more.
        self.decide_alone(&error);
    }

    /// Whether a connection has not taken all that was sent on it.
    pub(super) fn is_sending(&self) -> bool {
        self.send_halves.iter().flatten().any(|send_half| send_half.is_waiting())
    }

    /// Forgets the connection to `peer`.
    pub(super) fn remove_send_half(&mut self, peer: usize) {
        if let Some(slot) = self.send_halves.get_mut(peer) {
            *slot = None;
        }
    }

    fn send_half(&self, rank: usize) -> Option<&Arc<SendHalf>> {
        self.send_halves.get(rank).and_then(Option::as_ref)
    }

    fn broadcast(&self, message: &Message) {
        broadcast(&self.send_halves, message);
    }
}

fn broadcast(send_halves: &[Option<Arc<SendHalf>>], message: &Message) {
    match message.encode() {
        Ok(payload) => {
            send_halves.iter().flatten().for_each(|send_half| {
                send_half.send_encoded(&payload);
            });
        }
        Err(why) => debug_assert!(false, "{why}: what callers pass in is checked before it gets here"),
    }
}

fn set(flags: &mut [bool], at: usize) {
    if let Some(flag) = flags.get_mut(at) {
        *flag = true;
    }
}

/// Where `flags` are not set.
fn not(flags: &[bool]) -> Vec<usize> {
    (0..flags.len()).filter(|&at| flags.get(at) == Some(&false)).collect()
}
