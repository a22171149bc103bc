//! The messages of the control plane, and the frames that carry them over an authenticated connection.
//!
//! A frame is `length: u32 LE · payload · tag`, where the tag is the first 16 bytes of HMAC-SHA256 over (counter, length,
//! payload) with the key of this connection and direction. The counter is not sent: both sides count frames, so that a frame that
//! was forged, changed, left out, repeated or sent back is not accepted. There is no encryption; nothing secret is sent.

use std::fmt;

use hmac::{Hmac, Mac};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::Sha256;

use super::MAX_BLOB;
use super::stall::{LaneActivity, StallReport};
use crate::error::{Error, Notice};

/// Most bytes of a frame's payload.
pub(super) const MAX_PAYLOAD: usize = MAX_BLOB + 4096;

/// Most bytes of the label of a gathering.
pub(super) const MAX_LABEL: usize = 1024;

const _: () = assert!(MAX_BLOB + MAX_LABEL + 64 <= MAX_PAYLOAD, "a gathering's message fits into a frame");

/// Most bytes of a text inside a failure that is told to others.
const MAX_TEXT: usize = 16 << 10;

const LENGTH: usize = 4;
const TAG: usize = 16;

/// The messages of the control plane. "Up" is to rank 0, "down" from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// Up: this rank is there, with these settings that must be the same on all ranks.
    Join { config: Vec<(String, String)> },
    /// Down: the connection is not taken into the job.
    Refused { why: String },
    /// Down: all ranks are there. `session` is fresh randomness for keys.
    Start { session: [u8; 32] },
    /// Both ways: the sender is alive.
    Heartbeat,
    /// Up: this rank's part of a gathering.
    Gather { sequence: u64, label: String, blob: Blob },
    /// Down: some ranks' parts of a gathering that is complete.
    Gathered { sequence: u64, parts: Vec<(u32, Blob)> },
    /// Up: which ranks hold this up?
    WhoIsLate(Wait),
    /// Down: these.
    Late { wait: Wait, ranks: Vec<u32> },
    /// Up: this operation takes too long here.
    Stalled(LaneActivity),
    /// Down: what are you doing?
    StallQuery { number: u64 },
    /// Up: this.
    Doing { number: u64, doing: Vec<LaneActivity> },
    /// Down: who holds up whom.
    Stall(StallReport),
    /// Up: this has gone wrong here.
    Report(Failure),
    /// Down: the job has failed.
    Failed(Failure),
    /// Up: this rank is done.
    Leave,
    /// Down: all ranks are done.
    AllLeft,
    /// Up: this rank's part of a gathering whose result only rank 0 needs. To the others it has empty parts.
    GatherAt0 { sequence: u64, label: String, blob: Blob },
}

impl Message {
    pub(super) fn encode(&self) -> Result<Vec<u8>, String> {
        let bytes = postcard::to_stdvec(self).map_err(|e| e.to_string())?;
        if bytes.len() > MAX_PAYLOAD {
            return Err(format!("a message of {} bytes is over the limit of {MAX_PAYLOAD}", bytes.len()));
        }
        Ok(bytes)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        match postcard::take_from_bytes(bytes) {
            Ok((message, [])) => Ok(message),
            Ok((_, rest)) => Err(format!("{} bytes after the end of a message", rest.len())),
            Err(e) => Err(format!("a message that cannot be decoded ({e})")),
        }
    }
}

/// Messages for the parts of a gathering, as few as their size allows.
pub(super) fn gathered(sequence: u64, blobs: &[Vec<u8>]) -> Vec<Message> {
    // Of a part beside its bytes: its rank and its length.
    const OVERHEAD: usize = 16;
    const SPACE: usize = MAX_PAYLOAD - 64;
    let mut groups: Vec<Vec<(u32, Blob)>> = Vec::new();
    let mut size = SPACE;
    for (rank, blob) in blobs.iter().enumerate() {
        size += blob.len() + OVERHEAD;
        let part = (rank as u32, Blob(blob.clone()));
        match groups.last_mut() {
            Some(group) if size <= SPACE => group.push(part),
            _ => {
                size = blob.len() + OVERHEAD;
                groups.push(vec![part]);
            }
        }
    }
    groups.into_iter().map(|parts| Message::Gathered { sequence, parts }).collect()
}

/// What a rank may be waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Wait {
    /// The start of the job.
    Start,
    /// The gathering of this number.
    Gather(u64),
    /// The end of the job.
    Leave,
}

/// A failure as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Failure {
    Rendezvous(String),
    Notice(Notice),
}

impl Failure {
    /// `error` as `rank` tells it to the others.
    pub(super) fn new(error: &Error, rank: usize) -> Self {
        let mut failure = match error {
            Error::Rendezvous(text) => Failure::Rendezvous(text.clone()),
            other => Failure::Notice(other.to_notice(rank)),
        };
        let texts: [Option<&mut String>; 2] = match &mut failure {
            Failure::Rendezvous(text) => [Some(text), None],
            Failure::Notice(Notice::PeerLost { operation, detail, .. }) => [Some(operation), Some(detail)],
            Failure::Notice(Notice::Timeout { operation, .. }) => [Some(operation), None],
            Failure::Notice(Notice::Mismatch { ours, theirs, .. }) => [Some(ours), Some(theirs)],
            Failure::Notice(Notice::NotFinite { operation, value, .. }) => [Some(operation), Some(value)],
            Failure::Notice(Notice::Aborted { reason, .. }) => [Some(reason), None],
        };
        texts.into_iter().flatten().for_each(clip);
        failure
    }

    pub(super) fn into_error(self) -> Error {
        match self {
            Failure::Rendezvous(text) => Error::Rendezvous(text),
            Failure::Notice(notice) => notice.into(),
        }
    }
}

/// Bytes that are encoded in one piece rather than one by one.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Blob(pub(super) Vec<u8>);

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl<'de> Visitor<'de> for Bytes {
            type Value = Blob;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Blob, E> {
                Ok(Blob(bytes.to_vec()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Blob, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = seq.next_element()? {
                    bytes.push(byte);
                }
                Ok(Blob(bytes))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

/// Makes frames of one direction of a connection.
pub(super) struct Sealer {
    mac: Hmac<Sha256>,
    counter: u64,
}

impl Sealer {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Sealer { mac: keyed(key), counter: 0 }
    }

    /// Appends the next frame, with `payload` of at most [`MAX_PAYLOAD`] bytes, to `out`.
    pub(super) fn seal(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        debug_assert!(payload.len() <= MAX_PAYLOAD, "messages are checked when they are encoded");
        let length = (payload.len() as u32).to_le_bytes();
        let tag = tag(&self.mac, self.counter, length, payload).finalize().into_bytes();
        self.counter += 1;
        out.extend_from_slice(&length);
        out.extend_from_slice(payload);
        out.extend(tag.iter().take(TAG));
    }
}

/// Finds and checks the frames in the bytes of one direction of a connection.
pub(super) struct Opener {
    mac: Hmac<Sha256>,
    counter: u64,
    buffer: Vec<u8>,
    /// How much of the buffer has been used up.
    start: usize,
}

impl Opener {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Opener { mac: keyed(key), counter: 0, buffer: Vec::new(), start: 0 }
    }

    /// Takes bytes as they come. Memory grows with what has come, never with an announced length.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The payload of the next frame, if it is complete.
    ///
    /// # Errors
    /// Describes a frame that is not valid. The connection cannot be used any further.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        let Some((length, rest)) = rest.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let size = u32::from_le_bytes(*length) as usize;
        if size > MAX_PAYLOAD {
            return Err(format!("a frame of {size} bytes, over the limit of {MAX_PAYLOAD}"));
        }
        let Some((payload, rest)) = rest.split_at_checked(size) else { return Ok(None) };
        let Some(found) = rest.get(..TAG) else { return Ok(None) };
        tag(&self.mac, self.counter, *length, payload)
            .verify_truncated_left(found)
            .map_err(|_| format!("a frame (number {}) that is not authentic", self.counter))?;
        let payload = payload.to_vec();
        self.counter += 1;
        self.start += LENGTH + size + TAG;
        Ok(Some(payload))
    }
}

fn tag(mac: &Hmac<Sha256>, counter: u64, length: [u8; LENGTH], payload: &[u8]) -> Hmac<Sha256> {
    mac.clone().chain_update(counter.to_le_bytes()).chain_update(length).chain_update(payload)
}

/// HMAC-SHA256 with `key`.
pub(super) fn keyed(key: &[u8]) -> Hmac<Sha256> {
    <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// Cuts a text to [`MAX_TEXT`] bytes.
fn clip(text: &mut String) {
    if text.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: [u8; 32] = [7; 32];

    fn frames(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut sealer = Sealer::new(&KEY);
        let mut out = Vec::new();
        payloads.iter().for_each(|p| sealer.seal(p, &mut out));
        out
    }

    /// All frames, fed in pieces that end at `cuts`.
    fn open(bytes: &[u8], cuts: &[usize]) -> (Vec<Vec<u8>>, Option<String>) {
        let mut opener = Opener::new(&KEY);
        let mut found = Vec::new();
        let mut ends: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).chain([bytes.len()]).collect();
        ends.sort_unstable();
        let mut start = 0;
        for end in ends {
            opener.push(&bytes[start..end]);
            start = end;
            loop {
                match opener.next() {
                    Ok(Some(payload)) => found.push(payload),
                    Ok(None) => break,
                    Err(why) => return (found, Some(why)),
                }
            }
        }
        (found, None)
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8),
            cuts in prop::collection::vec(any::<usize>(), 0..12),
        ) {
            let (found, error) = open(&frames(&payloads), &cuts);
            prop_assert_eq!(error, None);
            prop_assert_eq!(found, payloads);
        }

        #[test]
        fn rubbish_is_never_a_frame(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(open(&bytes, &[]).0.is_empty());
        }

        #[test]
        fn any_changed_bit_stops_the_connection(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 1..5),
            at in any::<usize>(),
            bit in 0..8_u8,
        ) {
            let mut bytes = frames(&payloads);
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let (found, _) = open(&bytes, &[]);
            prop_assert!(found.len() < payloads.len());
            prop_assert_eq!(&found[..], &payloads[..found.len()]);
        }

        #[test]
        fn decoding_rubbish_is_an_error_or_a_message(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = Message::decode(&bytes) {
                prop_assert!(message.encode().is_ok());
            }
        }
    }

    #[test]
    fn repeated_and_left_out_frames_are_refused() {
        let one = frames(&[b"a".to_vec()]);
        let both = frames(&[b"a".to_vec(), b"b".to_vec()]);
        let (found, error) = open(&[&one[..], &one[..]].concat(), &[]);
        assert_eq!((found.len(), error.is_some()), (1, true));
        let (found, error) = open(&both[one.len()..], &[]);
        assert_eq!((found.len(), error.is_some()), (0, true));
    }

    #[test]
    fn long_frames_are_refused_before_they_come() {
        let mut opener = Opener::new(&KEY);
        opener.push(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
        assert!(opener.next().is_err());
    }

    #[test]
    fn parts_of_any_size_fit_into_messages() {
        for (size, count, messages) in
            [(0, 1, 1), (0, 5000, 1), (MAX_BLOB, 3, 3), (MAX_BLOB / 2, 4, 2), (1, 100_000, 2)]
        {
            let found = gathered(1, &vec![vec![1; size]; count]);
            assert_eq!(found.len(), messages, "{count} × {size}");
            assert!(found.iter().all(|m| m.encode().is_ok()));
            let ranks = found.iter().flat_map(|m| match m {
                Message::Gathered { parts, .. } => parts.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(),
                _ => vec![],
            });
            assert!(ranks.eq(0..count as u32));
        }
    }

    #[test]
    fn messages_round_trip() {
        let failure = Failure::new(&Error::invalid("x".repeat(MAX_TEXT * 3)), 2);
        for message in [
            Message::Join { config: vec![("seed".into(), "1".into())] },
            Message::Gather { sequence: 3, label: "l".into(), blob: Blob(vec![1; MAX_BLOB]) },
            Message::GatherAt0 { sequence: 3, label: "l".into(), blob: Blob(vec![1; MAX_BLOB]) },
            Message::Late { wait: Wait::Gather(1), ranks: vec![1, 2] },
            Message::Report(failure),
            Message::AllLeft,
        ] {
            assert_eq!(Message::decode(&message.encode().unwrap()), Ok(message));
        }
        assert!(
            Message::Gather { sequence: 0, label: String::new(), blob: Blob(vec![0; MAX_PAYLOAD]) }.encode().is_err()
        );
    }
}
