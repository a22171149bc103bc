//! Encoding chunks on several threads, with the results in order.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Scope};

use super::{Part, PrepareError};
use crate::corpus::CorpusError;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// What a chunk is made of: texts, each encoded by itself, and ends of documents.
#[derive(Debug)]
pub(super) enum Item {
    Text(String),
    Mark,
}

type Encoded = Result<Vec<u16>, TokenizerError>;

/// Takes the ids of a chunk, which has so many bytes of text.
pub(super) type Take<'a> = dyn FnMut(Part, &[u16], usize) -> Result<(), PrepareError> + 'a;

struct Job {
    items: Vec<Item>,
    reply: SyncSender<Encoded>,
}

/// A chunk whose ids are awaited.
struct Awaited {
    part: Part,
    bytes: usize,
    ids: Receiver<Encoded>,
}

/// Chunks under way: never more than a few for each thread, so that memory is bounded.
pub(super) struct Pipeline<'a> {
    jobs: SyncSender<Job>,
    awaited: VecDeque<Awaited>,
    most: usize,
    /// Takes each chunk in turn.
    take: &'a mut Take<'a>,
}

impl<'a> Pipeline<'a> {
    /// Starts the threads, which end when the pipeline is dropped.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        tokenizer: &'scope Tokenizer,
        threads: usize,
        take: &'a mut Take<'a>,
    ) -> Self {
        let most = 2 * threads.max(1);
        let (jobs, queue) = mpsc::sync_channel::<Job>(most);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads.max(1) {
            let queue = queue.clone();
            let work = move || {
                loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Job { items, reply }) = job else { break };
                    // Nobody waits where an error has ended it all.
                    let _ = reply.send(encode(tokenizer, &items));
                }
            };
            // With fewer threads than wanted it takes longer; with none the first chunk says so.
            let _ = thread::Builder::new().name("encode".into()).spawn_scoped(scope, work);
        }
        Pipeline { jobs, awaited: VecDeque::new(), most, take }
    }

    /// Has a chunk encoded; waits for an earlier one where too many are under way.
    pub(super) fn encode(&mut self, part: Part, items: Vec<Item>, bytes: usize) -> Result<(), PrepareError> {
        if self.awaited.len() >= self.most {
            self.take_next()?;
        }
        let (reply, ids) = mpsc::sync_channel(1);
        self.jobs.send(Job { items, reply }).map_err(|_| PrepareError::Thread)?;
        self.awaited.push_back(Awaited { part, bytes, ids });
        Ok(())
    }

    /// Waits for all chunks.
    pub(super) fn finish(mut self) -> Result<(), PrepareError> {
        while !self.awaited.is_empty() {
            self.take_next()?;
        }
        Ok(())
    }

    fn take_next(&mut self) -> Result<(), PrepareError> {
        let Some(Awaited { part, bytes, ids }) = self.awaited.pop_front() else { return Ok(()) };
        let ids = ids.recv().map_err(|_| PrepareError::Thread)?;
        let ids = ids.map_err(|source| CorpusError::Encode { origin: "the text".into(), source })?;
        (self.take)(part, &ids, bytes)
    }
}

fn encode(tokenizer: &Tokenizer, items: &[Item]) -> Encoded {
    let mut ids = Vec::new();
    for item in items {
        match item {
            Item::Text(text) => ids.extend(tokenizer.encode(text)?),
            Item::Mark => ids.extend(tokenizer.end_of_text()),
        }
    }
    Ok(ids)
}
