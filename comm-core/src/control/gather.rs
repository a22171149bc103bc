//! Gathers typed values from all ranks, over the bytes of [`Control::all_gather`].

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Control;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Gathers of values.
pub trait ControlExt: Control {
    /// Tells every rank of this one's `value`, and hears of every rank's, in rank order. All ranks call it with the same `label` and type,
    /// as [`Control::all_gather`]. What comes is at most [`MAX_BLOB`](super::MAX_BLOB) bytes a rank.
    ///
    /// # Errors
    /// Those of `all_gather`, and [`Error::Protocol`] for what is no value of this type.
    fn gather<T: Serialize + DeserializeOwned>(&self, label: &str, value: &T, deadline: Deadline) -> Result<Vec<T>> {
        let blob = encode(value).map_err(|error| Error::Internal(format!("{label}: {error}")))?;
        let blobs = self.all_gather(label, &blob, deadline)?;
        if blobs.len() != self.world_size() {
            return Err(Error::Rendezvous(format!("{label}: {} of {} ranks answered", blobs.len(), self.world_size())));
        }
        let read = |(rank, blob): (usize, &Vec<u8>)| {
            let who = || format!("rank {}", self.job_rank(rank));
            decode(blob).map_err(|why| Error::Protocol { who: who(), what: format!("{label}: {why}") })
        };
        blobs.iter().enumerate().map(read).collect()
    }

    /// As [`gather`](ControlExt::gather) of what each rank has of `what`. If one has none, which is an error there, all fail, so that none
    /// waits for one that has given up.
    ///
    /// # Errors
    /// As there; [`Error::Unsupported`] on all ranks, with the reasons of the first ranks that have none. A rank whose own error is another
    /// one gets that.
    fn gather_all<T: Serialize + DeserializeOwned>(
        &self,
        label: &str,
        what: &str,
        mine: Result<T>,
        deadline: Deadline,
    ) -> Result<Vec<T>> {
        let (mine, own) = match mine {
            Ok(value) => (RankResult::Ok(value), None),
            Err(Error::Unsupported { what: of, why }) if of == what => (RankResult::Err(why), None),
            Err(error) => (RankResult::Err(error.to_string()), Some(error)),
        };
        let told = self.gather(label, &mine, deadline)?;
        let (mut values, mut reasons) = (Vec::with_capacity(told.len()), Vec::new());
        for (rank, told) in told.into_iter().enumerate() {
            match told {
                Ok(value) => values.push(value),
                Err(why) => reasons.push((self.job_rank(rank), why)),
            }
        }
        match own {
            Some(error) => Err(error),
            None if reasons.is_empty() => Ok(values),
            None => Err(Error::Unsupported { what: what.into(), why: summary(&reasons, values.is_empty()) }),
        }
    }
}

impl<C: Control + ?Sized> ControlExt for C {}

/// A rank's value, or why it has none.
pub(crate) type RankResult<T> = Result<T, String>;

/// The first few reasons, which say it all, with the ranks whose they are; a single one that `all` ranks have stands for itself.
fn summary(reasons: &[(usize, String)], all: bool) -> String {
    if let [(_, why), rest @ ..] = reasons
        && all
        && rest.iter().all(|(_, other)| other == why)
    {
        return why.clone();
    }
    let named = reasons.iter().take(3).map(|(rank, why)| {
        let rank = format!("rank {rank}");
        if why.contains(&rank) { why.clone() } else { format!("{rank}: {why}") }
    });
    named.collect::<Vec<_>>().join("; ")
}

/// A value as it travels.
pub(crate) fn encode<T: Serialize>(value: &T) -> postcard::Result<Vec<u8>> {
    postcard::to_stdvec(value)
}

/// The value that `blob` is, all of it.
pub(crate) fn decode<T: DeserializeOwned>(blob: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(blob) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(format!("{} bytes follow its end", rest.len())),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::local;

    /// What each of `N` ranks gets that tells this.
    fn gather_all<const N: usize>(mine: [Result<u32>; N]) -> [Result<Vec<u32>>; N] {
        let ranks = local::group(N, 1);
        let all = std::thread::scope(|scope| {
            let gather = |control: &dyn Control, mine| {
                control.gather_all("memory", "enough memory", mine, Deadline::after(Duration::from_secs(30)))
            };
            let threads: Vec<_> =
                ranks.iter().zip(mine).map(|(rank, mine)| scope.spawn(move || gather(&*rank.control, mine))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        all.try_into().unwrap()
    }

    fn none(why: &str) -> Result<u32> {
        Err(Error::Unsupported { what: "enough memory".into(), why: why.into() })
    }

    #[test]
    fn bytes_after_a_value_are_noticed() {
        let mut blob = encode(&300u32).unwrap();
        assert_eq!(decode::<u32>(&blob), Ok(300));
        blob.push(0);
        assert!(decode::<u32>(&blob).unwrap_err().contains("1 bytes"));
        assert!(decode::<u32>(&blob[..1]).is_err());
    }

    #[test]
    fn what_one_rank_has_not_all_learn_of() {
        for all in gather_all([Ok(5), Ok(6), Ok(7)]) {
            assert_eq!(all.unwrap(), [5, 6, 7]);
        }
        let texts = |all: [Result<Vec<u32>>; 3]| all.map(|one| one.unwrap_err().to_string());
        for text in texts(gather_all([Ok(5), none("4 KiB"), none("rank 2 has none")])) {
            assert!(text.contains("rank 1: 4 KiB; rank 2 has none"), "{text}");
        }
        for text in texts(gather_all([none("no /proc"), none("no /proc"), none("no /proc")])) {
            assert!(text.ends_with("no /proc") && !text.contains("rank"), "{text}");
        }
        // An error of another kind stays what it is where it came about.
        let [here, there, _] = gather_all([Err(Error::invalid("no lanes")), Ok(1), Ok(2)]);
        assert!(matches!(here, Err(Error::InvalidArgument(_))), "{here:?}");
        assert!(matches!(&there, Err(Error::Unsupported { why, .. }) if why.contains("rank 0: ")), "{there:?}");
    }

    #[test]
    fn another_type_is_named_as_such() {
        let ranks = local::group(1, 1);
        let control: &dyn Control = &*ranks[0].control;
        let deadline = Deadline::after(Duration::from_secs(30));
        assert_eq!(control.gather("number", &7u8, deadline).unwrap(), [7]);
        assert!(decode::<(u8, String)>(&encode(&7u8).unwrap()).is_err());
    }
}
