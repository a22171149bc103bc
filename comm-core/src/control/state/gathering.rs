//! Gatherings: what each rank tells all others.

use super::State;
use crate::control::wire::{Blob, Message, gathered};
use crate::error::Error;

/// Most gatherings that may be under way at once.
const MAX_ROUNDS: usize = 64;

pub(super) struct Round {
    label: String,
    /// The rank that named the label first.
    first: usize,
    pub(super) blobs: Vec<Option<Vec<u8>>>,
}

impl State {
    /// Adds this rank's part of its next gathering and returns the gathering's number.
    pub(in crate::control) fn begin_gather(&mut self, label: &str, blob: &[u8]) -> u64 {
        let sequence = self.gatherings;
        self.gatherings += 1;
        if self.rank == 0 {
            self.contribute(0, sequence, label.to_string(), blob.to_vec());
        } else if let Some(send_half) = self.send_half(0) {
            send_half.send(&Message::Gather { sequence, label: label.to_string(), blob: Blob(blob.to_vec()) });
        }
        sequence
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
    pub(super) fn contribute(&mut self, rank: usize, sequence: u64, label: String, blob: Vec<u8>) {
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
    pub(super) fn receive_gathered(&mut self, sequence: u64, parts: Vec<(u32, Blob)>) -> Result<(), String> {
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

    pub(super) fn check_rounds(&self) -> Result<(), String> {
        if self.rounds.len() > MAX_ROUNDS { Err(format!("more than {MAX_ROUNDS} gatherings at once")) } else { Ok(()) }
    }
}
