//! Gatherings: what each rank tells all others.

use super::State;
use crate::control::MAX_BLOB;
use crate::control::wire::{Blob, MAX_LABEL, Message, gathered};
use crate::error::Error;

/// Most gatherings that may be under way at once.
const MAX_ROUNDS: usize = 64;

pub(super) struct Round {
    label: String,
    /// The rank that named the label first.
    first: usize,
    /// Whether only rank 0 needs the result.
    for_root: bool,
    pub(super) blobs: Vec<Option<Vec<u8>>>,
}

impl State {
    /// Adds this rank's part of its next gathering, whose result all ranks get, or rank 0 alone, and returns the gathering's number.
    pub(in crate::control) fn begin_gather(&mut self, label: &str, blob: &[u8], for_root: bool) -> u64 {
        let sequence = self.gatherings;
        self.gatherings += 1;
        let (label, blob) = (label.to_string(), blob.to_vec());
        if self.rank == 0 {
            self.contribute(0, sequence, (label, for_root), blob);
        } else if let Some(send_half) = self.send_half(0) {
            let blob = Blob(blob);
            send_half.send(&match for_root {
                true => Message::GatherAt0 { sequence, label, blob },
                false => Message::Gather { sequence, label, blob },
            });
        }
        sequence
    }

    /// At rank 0: takes another rank's part, if it is of the gathering that comes next there.
    ///
    /// # Errors
    /// Describes what that rank's own control would not have sent.
    pub(super) fn take_part(
        &mut self,
        peer: usize,
        sequence: u64,
        (label, for_root): (String, bool),
        Blob(blob): Blob,
    ) -> Result<(), String> {
        let expected = self.peer_gatherings.get_mut(peer).ok_or("a rank that does not exist")?;
        if sequence != *expected {
            return Err(format!("gathering {sequence} where {expected} comes next"));
        }
        *expected += 1;
        // With what comes beside it in the answer it may not fit into a frame.
        if label.len() > MAX_LABEL || blob.len() > MAX_BLOB {
            return Err(format!("{} B to gather under a label of {} B", blob.len(), label.len()));
        }
        self.contribute(peer, sequence, (label, for_root), blob);
        self.check_rounds()
    }

    /// The result of a gathering, once it is complete.
    pub(in crate::control) fn take_gathered(&mut self, sequence: u64) -> Option<Vec<Vec<u8>>> {
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
    fn contribute(&mut self, rank: usize, sequence: u64, (label, for_root): (String, bool), blob: Vec<u8>) {
        let n = self.world_size;
        let round = self.rounds.entry(sequence).or_insert_with(|| Round {
            label: label.clone(),
            first: rank,
            for_root,
            blobs: vec![None; n],
        });
        if (&round.label, round.for_root) != (&label, for_root) {
            let told = |rank: usize, label: &str, for_root| {
                let whom = if for_root { " for rank 0" } else { "" };
                (rank, format!("rank {rank} gathers {label:?}{whom}"))
            };
            let mut both = [told(rank, &label, for_root), told(round.first, &round.label, round.for_root)];
            both.sort();
            let [(_, one), (_, other)] = both;
            let error =
                Error::Rendezvous(format!("{one}, but {other}; all ranks must gather the same in the same order"));
            self.fail(&error);
            return;
        }
        if let Some(slot) = round.blobs.get_mut(rank) {
            *slot = Some(blob);
        }
        if round.blobs.iter().all(Option::is_some) {
            let blobs: Vec<Vec<u8>> = match round.for_root {
                true => vec![Vec::new(); n],
                false => round.blobs.iter().flatten().cloned().collect(),
            };
            gathered(sequence, &blobs).iter().for_each(|message| self.broadcast(message));
        }
    }

    /// At other ranks: takes parts of a gathering that is complete.
    pub(super) fn receive_gathered(&mut self, sequence: u64, parts: Vec<(u32, Blob)>) -> Result<(), String> {
        if sequence >= self.gatherings {
            return Err(format!("the result of gathering {sequence}, which has not begun"));
        }
        let n = self.world_size;
        let round = self.rounds.entry(sequence).or_insert_with(|| Round {
            label: String::new(),
            first: 0,
            for_root: false,
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

    pub(super) fn check_rounds(&self) -> Result<(), String> {
        if self.rounds.len() > MAX_ROUNDS { Err(format!("more than {MAX_ROUNDS} gatherings at once")) } else { Ok(()) }
    }
}
