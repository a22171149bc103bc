//! What one rank knows of its job, and how messages and events change it. No waiting and no reading happens here.
//!
//! Rank 0 decides: the first failure that it sees or is told becomes the job's, and it tells all. A rank that reports a failure
//! holds it as provisional until rank 0's word is there, and hands it to nobody: so all ranks end with the same error. Where
//! rank 0 is gone or does not answer, that is the job's failure, which every rank finds out by itself and words alike.
//!
//! Times are those of [`clock::running`](crate::clock::running).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::MAX_BLOB;
use super::auth::Hello;
use super::door::{Stranger, Strangers};
use super::link::Link;
use super::stall::{Activity, Doing, StallReport, abridged, within};
use super::wire::{Blob, Failure, MAX_LABEL, Message, Wait, gathered};
use crate::clock;
use crate::error::{Error, Result};
use crate::job::Job;

/// How long a provisional failure waits for rank 0's word. That takes a round trip and a turn of rank 0's event loop, so only a
/// rank 0 that is stopped, or cut off, lets it pass.
const SETTLE: Duration = Duration::from_secs(2);

/// How long a rendezvous that has gone wrong waits for the ranks that are still to come, to tell them too.
pub(super) const TELL: Duration = Duration::from_secs(2);

/// Most gatherings that may be under way at once.
const MAX_ROUNDS: usize = 64;

/// How often a rank looks for operations that have begun, so that those with a deadline of half a second or more are reported before
/// it.
const LOOK: Duration = Duration::from_millis(250);

/// How long ranks have to say what they are doing.
const SURVEY: Duration = Duration::from_millis(500);

/// An operation that has been looked at is not looked at again, for another of its ranks, within this time.
const RECENT: Duration = Duration::from_secs(1);

/// Most operations that wait to be looked at.
const MAX_STALLED: usize = 16;

pub(super) type Hook = Box<dyn Fn(&Error) + Send + Sync>;

pub(super) type StallHook = Arc<dyn Fn(&StallReport) + Send + Sync>;

pub(super) struct State {
    rank: usize,
    world_size: usize,
    job_id: String,
    epoch: u64,
    config: Vec<(String, String)>,
    /// By rank: at rank 0 those of all others, elsewhere only rank 0's.
    pub(super) links: Vec<Option<Arc<Link>>>,
    /// By rank, at rank 0: has sent its settings.
    joined: Vec<bool>,
    /// The randomness of this start, once all ranks are there.
    session: Option<[u8; 32]>,
    /// At rank 0: what is wrong with the rendezvous, and until when it waits for those who are to be told.
    trouble: Option<(Error, Duration)>,
    /// At rank 0: the connections that came to nothing.
    strangers: Strangers,
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
    /// At rank 0: the survey that is under way, and what is to be looked at after it.
    survey: Option<Survey>,
    stalled: VecDeque<(usize, Doing)>,
    /// At rank 0: what has been looked at, so that not every rank of an operation causes a survey of its own.
    surveyed: VecDeque<(Doing, Duration)>,
    surveys: u64,
    /// To be handed to the hooks.
    stall: Vec<StallReport>,
}

/// Stall reports and those who want them.
pub(super) struct DueStall {
    reports: Vec<StallReport>,
    activities: Vec<Arc<dyn Activity>>,
    hooks: Vec<StallHook>,
}

impl DueStall {
    /// Tells them. No lock may be held.
    pub(super) fn tell(self) {
        for report in &self.reports {
            for activity in &self.activities {
                activity.on_stall(report);
            }
            for hook in &self.hooks {
                super::guarded(|| hook(report));
            }
        }
    }
}

/// A question to all ranks: what are you doing?
struct Survey {
    reported_by: usize,
    stalled: Doing,
    answers: Vec<Option<Vec<Doing>>>,
    ends: Duration,
}

struct Round {
    label: String,
    /// Who was first to name the label.
    first: usize,
    blobs: Vec<Option<Vec<u8>>>,
}

/// What rank 0 does with a connection that has passed the handshake.
pub(super) enum Admission {
    /// Its messages are those of this rank.
    Admitted(usize),
    /// It has been told why not.
    Refused,
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
            links: vec![None; n],
            joined: vec![false; n],
            session: None,
            trouble: None,
            strangers: Strangers::default(),
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
            survey: None,
            stalled: VecDeque::new(),
            surveyed: VecDeque::new(),
            surveys: 0,
            stall: Vec::new(),
        };
        set(&mut state.joined, job.rank);
        state
    }

    // Failure

    /// The job's failure; before rank 0's word this rank's own.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.decided.as_ref().or(self.provisional.as_ref().map(|(error, _)| error))
    }

    /// The job's failure, the same on all ranks and for good.
    pub(super) fn settled_failure(&self) -> Option<&Error> {
        self.decided.as_ref()
    }

    /// When a provisional failure is [to be settled](State::settle), if one is there.
    pub(super) fn settles_at(&self) -> Option<Duration> {
        self.provisional.as_ref().map(|(_, until)| *until).filter(|_| self.decided.is_none())
    }

    /// Waits for rank 0's word no longer than it may take. What this rank has seen is then not what the others will report, but
    /// that rank 0 does not answer is.
    pub(super) fn settle(&mut self) {
        if self.settles_at().is_some_and(|until| clock::running() >= until) {
            self.decide_alone(&rank_0_is_silent());
        }
    }

    /// Makes `error`, seen by this rank, the job's failure unless there is one.
    pub(super) fn fail(&mut self, error: &Error) {
        if self.failure().is_some() {
            return;
        }
        if let Some(link) = self.link(0).filter(|_| self.rank != 0) {
            link.send(&Message::Report(Failure::new(error, self.rank)));
            self.provisional = Some((error.clone(), clock::running() + SETTLE));
        } else {
            self.decide_alone(error);
        }
    }

    /// As [`fail`](State::fail), where rank 0's word is not waited for. It is told nevertheless: if it was only stopped, or this
    /// rank can only not hear it, it shall not take this rank's end for the cause.
    pub(super) fn decide_alone(&mut self, error: &Error) {
        self.decide_reported();
        if self.decided.is_some() {
            return;
        }
        let failure = Failure::new(error, self.rank);
        if self.rank == 0 {
            self.broadcast(&Message::Failed(failure.clone()));
        } else if let Some(link) = self.link(0) {
            link.send(&Message::Report(failure.clone()));
        }
        // As everyone else gets it.
        self.decide(failure.into_error());
    }

    /// At rank 0, when everything that has come has been read: one of the failures that it was told becomes the job's, the first.
    /// Unless it was stopped, and others had to do without its word: what they report has become final there.
    pub(super) fn decide_reported(&mut self) {
        let mut reported = std::mem::take(&mut self.reported).into_iter();
        if self.decided.is_some() {
            return;
        }
        let silent = rank_0_is_silent();
        let is_final = |failure: &Failure| *failure == Failure::new(&silent, 0);
        let Some(first) = reported.next() else { return };
        let failure = if is_final(&first) { first } else { reported.find(is_final).unwrap_or(first) };
        self.broadcast(&Message::Failed(failure.clone()));
        self.decide(failure.into_error());
    }

    fn decide(&mut self, error: Error) {
        if self.decided.is_none() {
            self.decided = Some(error);
        }
    }

    pub(super) fn add_hook(&mut self, hook: Hook) {
        self.hooks.push(hook);
    }

    /// Hooks to call now, outside the lock, with the failure. They keep it, so it is the one that stays.
    pub(super) fn due_hooks(&mut self) -> Option<(Vec<Hook>, Error)> {
        if self.hooks.is_empty() {
            return None;
        }
        let error = self.settled_failure()?.clone();
        Some((std::mem::take(&mut self.hooks), error))
    }

    // Rendezvous

    pub(super) fn session(&self) -> Option<&[u8; 32]> {
        self.session.as_ref()
    }

    /// At rank 0: what the rendezvous fails with, once everyone who can be told is there or has had time to come.
    pub(super) fn ripe_trouble(&self) -> Option<Error> {
        let (error, until) = self.trouble.as_ref()?;
        let all_there = (1..self.world_size).all(|rank| self.link(rank).is_some());
        (all_there || clock::running() >= *until).then(|| error.clone())
    }

    /// When [`ripe_trouble`](State::ripe_trouble) has something at the latest.
    pub(super) fn trouble_ripens_at(&self) -> Option<Duration> {
        self.trouble.as_ref().map(|(_, until)| *until)
    }

    /// A connection came to nothing.
    pub(super) fn note_stranger(&mut self, stranger: &Stranger) {
        self.strangers.note(stranger);
    }

    /// For an error's text: what came instead of the ranks that are missing.
    pub(super) fn strangers(&self) -> String {
        self.strangers.to_string()
    }

    /// At rank 0: takes `link`, whose other end knows the secret and says `hello`, into the job, or tells it why not.
    pub(super) fn admit(&mut self, link: Arc<Link>, hello: &Hello) -> Admission {
        let rank = hello.rank as usize;
        let why = if hello.job != self.job_id {
            Some(format!("rank {rank} belongs to job {:?}, but this is job {:?}", hello.job, self.job_id))
        } else if hello.epoch != self.epoch {
            Some(format!("rank {rank} is of epoch {}, but this job is at epoch {}", hello.epoch, self.epoch))
        } else if let Some(error) = &self.decided {
            Some(format!("rank {rank} came after the job had failed: {error}"))
        } else if hello.world_size as usize != self.world_size {
            let why = format!("rank {rank} was started for {} ranks, rank 0 for {}", hello.world_size, self.world_size);
            self.trouble(&why);
            Some(why)
        } else if rank == 0 || rank >= self.world_size || self.link(rank).is_some() {
            let why = format!("there are two processes with rank {rank}");
            // One that comes to a running job harms nobody.
            if self.session.is_none() {
                self.trouble(&why);
            }
            Some(why)
        } else {
            None
        };
        if let Some(why) = why {
            self.strangers.note_refusal(&link, &why);
            link.send(&Message::Refused { why });
            link.finish();
            return Admission::Refused;
        }
        if let Some(slot) = self.links.get_mut(rank) {
            *slot = Some(link);
        }
        Admission::Admitted(rank)
    }

    /// At rank 0: everyone who has not sent its settings yet.
    pub(super) fn missing(&self) -> Vec<usize> {
        not(&self.joined)
    }

    fn join(&mut self, rank: usize, config: &[(String, String)]) {
        set(&mut self.joined, rank);
        if let Some(why) = difference(&self.config, config, rank) {
            self.trouble(&why);
        }
        self.start_if_complete();
    }

    /// At rank 0: starts the job when all ranks are there and agree.
    pub(super) fn start_if_complete(&mut self) {
        if self.session.is_some() || self.trouble.is_some() || self.decided.is_some() || !self.missing().is_empty() {
            return;
        }
        match super::auth::fresh_session() {
            Ok(session) => {
                self.session = Some(session);
                self.broadcast(&Message::Start { session });
            }
            Err(error) => self.fail(&error),
        }
    }

    fn trouble(&mut self, why: &str) {
        if self.trouble.is_none() {
            self.trouble = Some((Error::Rendezvous(why.to_string()), clock::running() + TELL));
        }
    }

    // Gathering

    /// Adds this rank's part of its next gathering and returns the gathering's number.
    pub(super) fn begin_gather(&mut self, label: &str, blob: &[u8]) -> u64 {
        let sequence = self.gatherings;
        self.gatherings += 1;
        if self.rank == 0 {
            self.contribute(0, sequence, label.to_string(), blob.to_vec());
        } else if let Some(link) = self.link(0) {
            link.send(&Message::Gather { sequence, label: label.to_string(), blob: Blob(blob.to_vec()) });
        }
        sequence
    }

    /// The result of a gathering, once it is complete.
    pub(super) fn take_gathered(&mut self, sequence: u64) -> Option<Vec<Vec<u8>>> {
        if !self.rounds.get(&sequence)?.blobs.iter().all(Option::is_some) {
            return None;
        }
        // Results that nobody waits for any more go with it.
        let mut rest = self.rounds.split_off(&sequence);
        let round = rest.remove(&sequence)?;
        self.rounds = rest;
        Some(round.blobs.into_iter().flatten().collect())
    }

    /// At rank 0: takes one rank's part.
    fn contribute(&mut self, rank: usize, sequence: u64, label: String, blob: Vec<u8>) {
        let n = self.world_size;
        let round = self.rounds.entry(sequence).or_insert_with(|| Round {
            label: label.clone(),
            first: rank,
            blobs: vec![None; n],
        });
        if round.label != label {
            let (a, b) = if rank < round.first {
                ((rank, &label), (round.first, &round.label))
            } else {
                ((round.first, &round.label), (rank, &label))
            };
            let error = Error::Rendezvous(format!(
                "rank {} gathers {:?}, but rank {} gathers {:?}; all ranks must gather the same in the same order",
                a.0, a.1, b.0, b.1
            ));
            self.fail(&error);
            return;
        }
        if let Some(slot) = round.blobs.get_mut(rank) {
            *slot = Some(blob);
        }
        if round.blobs.iter().all(Option::is_some) {
            let blobs: Vec<Vec<u8>> = round.blobs.iter().flatten().cloned().collect();
            gathered(sequence, &blobs).iter().for_each(|message| self.broadcast(message));
        }
    }

    /// At other ranks: takes parts of a gathering that is complete.
    fn receive_gathered(&mut self, sequence: u64, parts: Vec<(u32, Blob)>) -> Result<(), String> {
        if sequence >= self.gatherings {
            return Err(format!("the result of gathering {sequence}, which has not begun"));
        }
        let n = self.world_size;
        let round = self.rounds.entry(sequence).or_insert_with(|| Round {
            label: String::new(),
            first: 0,
            blobs: vec![None; n],
        });
        for (rank, blob) in parts {
            match round.blobs.get_mut(rank as usize) {
                Some(slot) => *slot = Some(blob.0),
                None => return Err(format!("a part of rank {rank}, which does not exist")),
            }
        }
        self.check_rounds()
    }

    fn check_rounds(&self) -> Result<(), String> {
        if self.rounds.len() > MAX_ROUNDS { Err(format!("more than {MAX_ROUNDS} gatherings at once")) } else { Ok(()) }
    }

    // Leaving

    pub(super) fn begin_leave(&mut self) {
        if self.is_leaving() {
            return;
        }
        set(&mut self.leaving, self.rank);
        if self.rank == 0 {
            self.end_if_all_leave();
        } else if let Some(link) = self.link(0) {
            link.send(&Message::Leave);
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
        if let Some(link) = self.link(0) {
            link.send(&Message::WhoIsLate(wait));
        }
    }

    // Stalls

    pub(super) fn watch(&mut self, activity: Weak<dyn Activity>) {
        // Those of communicators that are gone have nothing to say.
        self.activities.retain(|activity| activity.strong_count() > 0);
        self.activities.push(activity);
    }

    pub(super) fn add_stall_hook(&mut self, hook: StallHook) {
        self.stall_hooks.push(hook);
    }

    /// Hooks to call now, outside the lock, with a new report.
    pub(super) fn due_stall(&mut self) -> Option<DueStall> {
        let reports = std::mem::take(&mut self.stall);
        (!reports.is_empty()).then(|| DueStall {
            reports,
            activities: self.activities().collect(),
            hooks: self.stall_hooks.clone(),
        })
    }

    /// Looks whether an operation of this rank takes too long, and at rank 0 whether a survey is at its end.
    pub(super) fn check_stall(&mut self, now: Duration) {
        if self.failure().is_some() || self.is_leaving() {
            self.survey = None;
            self.stalled.clear();
            return;
        }
        let overdue = self.activities().find_map(|activity| activity.overdue());
        if let Some(stalled) = overdue {
            if self.rank == 0 {
                self.begin_survey(0, within(stalled, self.world_size), now);
            } else if let Some(link) = self.link(0) {
                link.send(&Message::Stalled(within(stalled, self.world_size)));
            }
        }
        if self.survey.as_ref().is_some_and(|survey| now >= survey.ends) {
            self.end_survey();
        }
    }

    /// When there is something to [check](State::check_stall) at the latest, as far as is known `now`: at the end of the survey under
    /// way, and when an operation of this rank takes too long.
    pub(super) fn stall_check_at(&self, now: Duration) -> Option<Duration> {
        // After a failure nobody looks at it any more.
        if self.failure().is_some() || self.is_leaving() {
            return None;
        }
        let overdue = self.activities().filter_map(|activity| activity.overdue_in()).min();
        let overdue = overdue.map(|left| now.saturating_add(left));
        let survey = self.survey.as_ref().map(|survey| survey.ends);
        // What begins after this is found at the next look.
        let next_look = self.has_activities().then_some(now + LOOK);
        [overdue, survey, next_look].into_iter().flatten().min()
    }

    fn has_activities(&self) -> bool {
        self.activities.iter().any(|activity| activity.strong_count() > 0)
    }

    fn activities(&self) -> impl Iterator<Item = Arc<dyn Activity>> {
        self.activities.iter().filter_map(Weak::upgrade)
    }

    /// What this rank does, for the others.
    fn doing(&self) -> Vec<Doing> {
        abridged(self.activities().flat_map(|activity| activity.doing()).collect())
    }

    /// At rank 0: has everyone asked what they are doing, now or after the survey under way.
    fn begin_survey(&mut self, reported_by: usize, stalled: Doing, now: Duration) {
        if self.failure().is_some() {
            return;
        }
        self.surveyed.retain(|(_, at)| now.saturating_sub(*at) < RECENT);
        let mut known = self.stalled.iter().map(|(_, other)| other).chain(self.surveyed.iter().map(|(other, _)| other));
        if known.any(|other| other.is_same(&stalled)) || self.stalled.len() == MAX_STALLED {
            return;
        }
        self.stalled.push_back((reported_by, stalled));
        self.next_survey(now);
    }

    fn next_survey(&mut self, now: Duration) {
        if self.survey.is_some() {
            return;
        }
        let Some((reported_by, stalled)) = self.stalled.pop_front() else { return };
        let doing = self.doing();
        let mut answers = vec![None; self.world_size];
        if let Some(mine) = answers.first_mut() {
            *mine = Some(doing);
        }
        self.surveyed.push_back((stalled.clone(), now));
        self.survey = Some(Survey { reported_by, stalled, answers, ends: now + SURVEY });
        self.surveys += 1;
        self.broadcast(&Message::Survey { number: self.surveys });
        self.end_survey_if_complete();
    }

    fn end_survey_if_complete(&mut self) {
        if self.survey.as_ref().is_some_and(|survey| survey.answers.iter().all(Option::is_some)) {
            self.end_survey();
        }
    }

    fn end_survey(&mut self) {
        if let Some(Survey { reported_by, stalled, answers, .. }) = self.survey.take() {
            let report = StallReport::new(reported_by, stalled, &answers);
            self.broadcast(&Message::Stall(report.clone()));
            self.stall.push(report);
            self.next_survey(clock::running());
        }
    }

    // Events

    /// Takes a message of `peer`.
    ///
    /// # Errors
    /// What the message has to do with nothing; the connection cannot be trusted any further.
    pub(super) fn on_message(&mut self, peer: usize, message: Message) -> Result<(), String> {
        if self.rank == 0 { self.on_message_up(peer, message) } else { self.on_message_down(message) }
    }

    fn on_message_up(&mut self, peer: usize, message: Message) -> Result<(), String> {
        match message {
            Message::Heartbeat => {}
            Message::Join { config } => self.join(peer, &config),
            Message::Gather { sequence, label, blob } => {
                let expected = self.peer_gatherings.get_mut(peer).ok_or("a rank that does not exist")?;
                if sequence != *expected {
                    return Err(format!("gathering {sequence} where {expected} comes next"));
                }
                *expected += 1;
                // Its own control would not have sent it, and with what comes beside it in the answer it may not fit into a frame.
                if label.len() > MAX_LABEL || blob.0.len() > MAX_BLOB {
                    return Err(format!("{} B to gather under a label of {} B", blob.0.len(), label.len()));
                }
                self.contribute(peer, sequence, label, blob.0);
                self.check_rounds()?;
            }
            Message::WhoIsLate(wait) => {
                let ranks = self.late(wait).into_iter().map(|rank| rank as u32).collect();
                if let Some(link) = self.link(peer) {
                    link.send(&Message::Late { wait, ranks });
                }
            }
            Message::Stalled(stalled) => self.begin_survey(peer, within(stalled, self.world_size), clock::running()),
            Message::Doing { number, doing } => {
                if let Some(survey) = self.survey.as_mut().filter(|_| number == self.surveys)
                    && let Some(answer) = survey.answers.get_mut(peer)
                {
                    *answer = Some(abridged(doing));
                    self.end_survey_if_complete();
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
            Message::Survey { number } => {
                let doing = self.doing();
                if let Some(link) = self.link(0) {
                    link.send(&Message::Doing { number, doing });
                }
            }
            Message::Stall(report) => self.stall.push(report),
            Message::Failed(failure) => self.decide(failure.into_error()),
            Message::AllLeft => {
                self.all_left = true;
                if let Some(link) = self.link(0) {
                    link.finish();
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
        self.links.iter().flatten().any(|link| link.is_waiting())
    }

    /// Forgets the connection to `peer`.
    pub(super) fn remove_link(&mut self, peer: usize) {
        if let Some(slot) = self.links.get_mut(peer) {
            *slot = None;
        }
    }

    fn link(&self, rank: usize) -> Option<&Arc<Link>> {
        self.links.get(rank).and_then(Option::as_ref)
    }

    fn broadcast(&self, message: &Message) {
        broadcast(&self.links, message);
    }
}

/// What every rank says of a rank 0 that is stopped or cut off, whether it has asked it something or only listened.
pub(super) fn rank_0_is_silent() -> Error {
    let detail = "it does not answer; its process is stopped, or the network to it is down".into();
    Error::PeerLost { rank: 0, operation: String::new(), detail }
}

fn broadcast(links: &[Option<Arc<Link>>], message: &Message) {
    match message.encode() {
        Ok(payload) => {
            links.iter().flatten().for_each(|link| {
                link.send_encoded(&payload);
            });
        }
        Err(why) => debug_assert!(false, "{why}: what callers pass in is checked before it gets here"),
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

fn set(flags: &mut [bool], at: usize) {
    if let Some(flag) = flags.get_mut(at) {
        *flag = true;
    }
}

/// Where `flags` are not set.
fn not(flags: &[bool]) -> Vec<usize> {
    (0..flags.len()).filter(|&at| flags.get(at) == Some(&false)).collect()
}
