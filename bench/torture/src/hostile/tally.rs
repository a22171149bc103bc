//! How many strangers came, and what became of them.

use std::time::Duration;

use serde::Serialize;

/// The outcome of one connection attempt, or of one datagram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AttackOutcome {
    pub(super) end: End,
    /// Bytes that the job said to it.
    pub(super) heard: usize,
    /// From its connection to its end.
    pub(super) lasted: Duration,
    /// It has been there for longer than the job may put up with it.
    pub(super) is_overdue: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum End {
    /// The port was closed meanwhile: this one does not count.
    #[default]
    NoPort,
    /// It was never connected, since the queue of the port was full.
    NotConnected,
    /// It left by itself.
    Left,
    /// The job closed the connection.
    Closed,
    /// The job told it why not. With words, if there were any.
    Refused(String),
    /// Nobody answered.
    Ignored,
    /// It was still connected when its patience was over.
    StillThere,
    /// It was taken for a rank.
    LetIn,
}

/// The outcomes of many attempts, counted.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Tally {
    /// Attempts, those at ports that had been closed included.
    pub(super) tried: u64,
    pub(super) no_port: u64,
    pub(super) not_connected: u64,
    pub(super) left: u64,
    pub(super) closed: u64,
    pub(super) refused: u64,
    pub(super) ignored: u64,
    pub(super) still_there: u64,
    /// Of these, those for whom the job's own bound had passed.
    pub(super) overdue: u64,
    pub(super) let_in: u64,
    /// How many heard anything at all.
    pub(super) answered: u64,
    /// Most bytes that one heard.
    pub(super) heard_most: usize,
    /// Longest time until the job closed a connection.
    pub(super) longest_ms: f64,
    /// The last message with which one was refused.
    pub(super) words: Option<String>,
}

impl Tally {
    pub(super) fn add(&mut self, outcome: AttackOutcome) {
        let lasted = outcome.lasted.as_secs_f64() * 1e3;
        self.tried += 1;
        self.answered += u64::from(outcome.heard > 0);
        self.heard_most = self.heard_most.max(outcome.heard);
        self.overdue += u64::from(outcome.is_overdue);
        match outcome.end {
            End::NoPort => self.no_port += 1,
            End::NotConnected => self.not_connected += 1,
            End::Left => self.left += 1,
            End::Closed => {
                self.closed += 1;
                self.longest_ms = self.longest_ms.max(lasted);
            }
            End::Refused(words) => {
                self.refused += 1;
                self.longest_ms = self.longest_ms.max(lasted);
                if !words.is_empty() {
                    self.words = Some(words);
                }
            }
            End::Ignored => self.ignored += 1,
            End::StillThere => self.still_there += 1,
            End::LetIn => self.let_in += 1,
        }
    }

    pub(super) fn merge(&mut self, other: &Tally) {
        self.tried += other.tried;
        self.no_port += other.no_port;
        self.not_connected += other.not_connected;
        self.left += other.left;
        self.closed += other.closed;
        self.refused += other.refused;
        self.ignored += other.ignored;
        self.still_there += other.still_there;
        self.overdue += other.overdue;
        self.let_in += other.let_in;
        self.answered += other.answered;
        self.heard_most = self.heard_most.max(other.heard_most);
        self.longest_ms = self.longest_ms.max(other.longest_ms);
        if other.words.is_some() {
            self.words.clone_from(&other.words);
        }
    }

    /// Those that found an open port.
    pub(super) fn live(&self) -> u64 {
        self.tried - self.no_port - self.not_connected
    }

    /// How they were answered, in a few words.
    pub(super) fn ends(&self) -> String {
        let parts: Vec<String> = [
            (self.let_in, "LET IN"),
            (self.refused, "refused"),
            (self.closed, "closed"),
            (self.ignored, "ignored"),
            (self.left, "left"),
            (self.still_there, "still there"),
            (self.not_connected, "not connected"),
            (self.no_port, "found no port"),
        ]
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stranger_is_counted_once() {
        let mut tally = Tally::default();
        let ends = [
            End::NoPort,
            End::NotConnected,
            End::Left,
            End::Closed,
            End::Refused("no".into()),
            End::Ignored,
            End::StillThere,
            End::LetIn,
        ];
        for (n, end) in ends.into_iter().enumerate() {
            tally.add(AttackOutcome { end, heard: n, lasted: Duration::from_millis(n as u64), is_overdue: n == 6 });
        }
        assert_eq!((tally.tried, tally.live(), tally.answered, tally.heard_most), (8, 6, 7, 7));
        assert_eq!((tally.longest_ms, tally.overdue), (4.0, 1));
        let mut twice = tally.clone();
        twice.merge(&tally);
        assert_eq!((twice.live(), twice.let_in, twice.longest_ms), (12, 2, 4.0));
        assert!(tally.ends().starts_with("1 LET IN, 1 refused"));
    }
}
