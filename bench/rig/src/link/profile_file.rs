//! Profiles as TOML.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::emulator::{Loss, PipeSpec};
use super::profile::{Carrier, Pipes, Profile, usual_queue};
use super::rate::Rate;
use super::units::{bytes, is_time, share, time};
use super::{MAX_ENDS, MTU};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    about: Option<String>,
    carrier: Carrier,
    mtu: Option<u32>,
    seed: Option<u64>,
    #[serde(default)]
    up: PipeText,
    #[serde(default)]
    down: PipeText,
    #[serde(default)]
    end: Vec<EndText>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EndText {
    rank: usize,
    #[serde(default)]
    up: PipeText,
    #[serde(default)]
    down: PipeText,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PipeText {
    rate: Option<String>,
    queue: Option<String>,
    delay: Option<String>,
    jitter: Option<String>,
    loss: Option<LossText>,
    reorder: Option<ReorderText>,
    duplicate: Option<String>,
}

/// `"0.5%"`, or bursts.
#[derive(Clone, Debug)]
enum LossText {
    Share(String),
    Bursts(BurstsText),
}

/// A chain of two states, asked for every packet: outside of a burst nothing is lost.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BurstsText {
    /// How often a burst begins.
    enter: String,
    /// How often one ends.
    leave: String,
    /// How much of what comes meanwhile is lost.
    lost: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReorderText {
    share: String,
    by: String,
}

const DEFAULT_MTU: u32 = 1500;
const DEFAULT_SEED: u64 = 1;

/// Reads a profile; `file` is for complaints.
///
/// # Errors
/// What is wrong, with file and key, for the user.
pub(super) fn parse(name: &str, file: &str, text: &str) -> Result<Profile, String> {
    let read: FileText = toml::from_str(text).map_err(|error| complaint(file, text, &error))?;
    read.profile(name).map_err(|why| format!("{file}: {why}"))
}

/// One line, where TOML's own has several.
fn complaint(file: &str, text: &str, error: &toml::de::Error) -> String {
    let message = error.message().trim().replace('\n', " ");
    let before = error.span().and_then(|span| text.get(..span.start));
    match before {
        Some(before) => format!("{file}, line {}: {message}", before.matches('\n').count() + 1),
        None => format!("{file}: {message}"),
    }
}

impl FileText {
    fn profile(self, name: &str) -> Result<Profile, String> {
        let mtu = self.mtu.unwrap_or(if self.carrier == Carrier::None { *MTU.end() } else { DEFAULT_MTU });
        if !MTU.contains(&mtu) {
            return Err(format!("mtu: {mtu} must be from {} to {}", MTU.start(), MTU.end()));
        }
        let pipes = |up: &PipeText, down: &PipeText, place: &str| -> Result<Pipes, String> {
            let pipe = |text: &PipeText, key: &str| {
                let key = format!("{place}{key}");
                text.check(self.carrier, &key)?;
                text.pipe(mtu, &key)
            };
            Ok(Pipes { up: pipe(up, "up")?, down: pipe(down, "down")? })
        };
        let usual = pipes(&self.up, &self.down, "")?;
        let mut unusual = BTreeMap::new();
        for end in &self.end {
            let place = format!("end of rank {}: ", end.rank);
            if end.rank >= MAX_ENDS {
                return Err(format!("{place}there are at most {MAX_ENDS} ends, numbered from 0"));
            }
            let these = pipes(&end.up.or(&self.up), &end.down.or(&self.down), &place)?;
            if unusual.insert(end.rank, these).is_some() {
                return Err(format!("{place}it is given twice"));
            }
        }
        if self.carrier == Carrier::None && !unusual.is_empty() {
            return Err("end: loopback has no ends; choose the carrier `veth` or `emulated`".into());
        }
        Ok(Profile {
            name: name.into(),
            about: self.about.unwrap_or_default(),
            carrier: self.carrier,
            mtu,
            seed: self.seed.unwrap_or(DEFAULT_SEED),
            usual,
            unusual,
        })
    }
}

impl PipeText {
    /// These, and for what they leave open the `usual` ones.
    fn or(&self, usual: &PipeText) -> PipeText {
        fn either<T: Clone>(this: &Option<T>, usual: &Option<T>) -> Option<T> {
            this.clone().or_else(|| usual.clone())
        }
        PipeText {
            rate: either(&self.rate, &usual.rate),
            queue: either(&self.queue, &usual.queue),
            delay: either(&self.delay, &usual.delay),
            jitter: either(&self.jitter, &usual.jitter),
            loss: either(&self.loss, &usual.loss),
            reorder: either(&self.reorder, &usual.reorder),
            duplicate: either(&self.duplicate, &usual.duplicate),
        }
    }

    /// Whether the carrier can do it.
    fn check(&self, carrier: Carrier, key: &str) -> Result<(), String> {
        let limits = [("rate", self.rate.is_some()), ("queue", self.queue.is_some())];
        let harm = [
            ("delay", self.delay.is_some()),
            ("jitter", self.jitter.is_some()),
            ("loss", self.loss.is_some()),
            ("reorder", self.reorder.is_some()),
            ("duplicate", self.duplicate.is_some()),
        ];
        let first = |keys: &[(&'static str, bool)]| keys.iter().find(|(_, is_set)| *is_set).map(|(name, _)| *name);
        let (found, can) = match carrier {
            Carrier::Emulated => return Ok(()),
            Carrier::Veth => (first(&harm), "the carrier `veth` has only rate and queue"),
            Carrier::None => (first(&limits).or(first(&harm)), "loopback has no pipes"),
        };
        found.map_or(Ok(()), |name| Err(format!("{key}.{name}: {can}; use carrier = \"emulated\"")))
    }

    fn pipe(&self, mtu: u32, key: &str) -> Result<PipeSpec, String> {
        let rate: Option<Rate> = at(key, "rate", &self.rate, |text| text.parse())?;
        let delay = at(key, "delay", &self.delay, time)?.unwrap_or_default();
        let jitter = at(key, "jitter", &self.jitter, time)?.unwrap_or_default();
        if jitter > delay {
            return Err(format!("{key}.jitter: it is more than the delay, so packets would arrive before they leave"));
        }
        let mut pipe = PipeSpec {
            rate_bits_per_s: rate.map(Rate::bits_per_second),
            delay,
            jitter,
            loss: self.loss.as_ref().map_or(Ok(Loss::None), |loss| loss.parse(key))?,
            reorder_probability: 0.0,
            reorder_by: Duration::ZERO,
            duplicate_probability: at(key, "duplicate", &self.duplicate, share)?.unwrap_or(0.0),
            queue_bytes: self.queue(rate, mtu, key)?,
        };
        if let Some(reorder) = &self.reorder {
            pipe.reorder_probability = share(&reorder.share).map_err(|why| format!("{key}.reorder.share: {why}"))?;
            pipe.reorder_by = time(&reorder.by).map_err(|why| format!("{key}.reorder.by: {why}"))?;
            if pipe.reorder_by.is_zero() {
                return Err(format!(
                    "{key}.reorder.by: it must be above 0, because packets without extra delay keep their order"
                ));
            }
        }
        Ok(pipe)
    }

    fn queue(&self, rate: Option<Rate>, mtu: u32, key: &str) -> Result<Option<u64>, String> {
        let Some(rate) = rate else {
            return match self.queue {
                Some(_) => {
                    Err(format!("{key}.queue: without a rate no packet is queued; give a rate, or leave out the queue"))
                }
                None => Ok(None),
            };
        };
        let Some(text) = &self.queue else { return Ok(Some(usual_queue(rate, mtu))) };
        let bytes = if is_time(text) {
            time(text).map(|time| (rate.bits_per_second() as f64 / 8.0 * time.as_secs_f64()).round() as u64)
        } else {
            bytes(text)
        };
        let bytes = bytes.map_err(|why| format!("{key}.queue: {why}; a time counts at the pipe's rate"))?;
        if bytes < 2 * u64::from(mtu) || bytes > u64::from(u32::MAX) {
            return Err(format!("{key}.queue: {bytes} B must be at least two packets of {mtu} B, and at most 4 GB"));
        }
        Ok(Some(bytes))
    }
}

fn at<T>(
    key: &str,
    name: &str,
    text: &Option<String>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    text.as_ref().map(|text| parse(text).map_err(|why| format!("{key}.{name}: {why}"))).transpose()
}

impl LossText {
    fn parse(&self, key: &str) -> Result<Loss, String> {
        let bursts = match self {
            LossText::Share(text) => {
                let probability = share(text).map_err(|why| format!("{key}.loss: {why}"))?;
                return Ok(if probability > 0.0 { Loss::Random { probability } } else { Loss::None });
            }
            LossText::Bursts(bursts) => bursts,
        };
        let part = |name: &str, text: &str| share(text).map_err(|why| format!("{key}.loss.{name}: {why}"));
        let (enter, leave) = (part("enter", &bursts.enter)?, part("leave", &bursts.leave)?);
        if enter == 0.0 || leave == 0.0 {
            return Err(format!("{key}.loss: enter and leave must be above 0%, or a burst never begins or never ends"));
        }
        Ok(Loss::Bursty { enter, leave, loss_in_burst: part("lost", &bursts.lost)? })
    }
}

impl<'de> Deserialize<'de> for LossText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = LossText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a share like \"0.5%\", or bursts like { enter = \"0.1%\", leave = \"10%\", lost = \"50%\" }",
                )
            }

            fn visit_str<E>(self, text: &str) -> Result<LossText, E> {
                Ok(LossText::Share(text.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LossText, A::Error> {
                BurstsText::deserialize(MapAccessDeserializer::new(map)).map(LossText::Bursts)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: &str = r#"
        about = "everything"
        carrier = "emulated"
        mtu = 1400
        seed = 7
        [up]
        rate = "10mbit"
        queue = "50ms"
        delay = "25ms"
        jitter = "2ms"
        loss = { enter = "0.1%", leave = "10%", lost = "50%" }
        reorder = { share = "1%", by = "5ms" }
        duplicate = "0.1%"
        [down]
        rate = "20mbit"
        loss = "0.5%"
        [[end]]
        rank = 1
        up = { rate = "1mbit" }
    "#;

    #[test]
    fn everything_that_can_be_said_is_understood() {
        let profile = parse("full", "full.toml", FULL).unwrap();
        assert_eq!((profile.mtu, profile.seed, profile.about.as_str()), (1400, 7, "everything"));
        let up = &profile.usual.up;
        assert_eq!((up.rate_bits_per_s, up.queue_bytes), (Some(10_000_000), Some(62_500)));
        assert_eq!((up.delay, up.jitter), (Duration::from_millis(25), Duration::from_millis(2)));
        assert_eq!(up.loss, Loss::Bursty { enter: 0.001, leave: 0.1, loss_in_burst: 0.5 });
        assert_eq!((up.reorder_probability, up.reorder_by), (0.01, Duration::from_millis(5)));
        assert_eq!(up.duplicate_probability, 0.001);
        let down = &profile.usual.down;
        assert_eq!((down.queue_bytes, down.loss), (Some(125_000), Loss::Random { probability: 0.005 }));
        // What the end does not say is as usual, and a queue in milliseconds follows its own rate.
        let slow = &profile.unusual[&1];
        assert_eq!((slow.up.rate_bits_per_s, slow.up.delay), (Some(1_000_000), Duration::from_millis(25)));
        assert_eq!((slow.up.queue_bytes, &slow.down), (Some(6_250), down));
    }

    #[test]
    fn what_is_wrong_is_named_with_file_and_key() {
        for (text, parts) in [
            ("carrier = \"pigeon\"", &["line 1", "pigeon", "emulated"][..]),
            ("mtu = 1500", &["carrier"]),
            ("carrier = \"veth\"\nspeed = 1", &["line 2", "speed"]),
            ("carrier = \"veth\"\n[up]\nrate = \"1gbit\"\nspeed = 1", &["line 4", "speed"]),
            ("carrier = \"veth\"\nmtu = 100", &["mtu", "100"]),
            ("carrier = \"veth\"\n[up]\nrate = \"fast\"", &["up.rate", "fast"]),
            ("carrier = \"veth\"\n[up]\ndelay = \"5ms\"", &["up.delay", "emulated"]),
            ("carrier = \"veth\"\n[[end]]\nrank = 2\ndown = { loss = \"1%\" }", &["rank 2", "down.loss", "emulated"]),
            ("carrier = \"none\"\n[down]\nrate = \"1gbit\"", &["down.rate", "loopback"]),
            ("carrier = \"none\"\n[[end]]\nrank = 0", &["end", "loopback"]),
            ("carrier = \"emulated\"\n[up]\nloss = 0.5", &["line 3", "0.5%"]),
            ("carrier = \"emulated\"\n[up]\nloss = \"half\"", &["up.loss", "half"]),
            ("carrier = \"emulated\"\n[up]\nloss = { enter = \"1%\" }", &["leave"]),
            ("carrier = \"emulated\"\n[up]\nloss = { enter = \"0%\", leave = \"1%\", lost = \"1%\" }", &["up.loss"]),
            ("carrier = \"emulated\"\n[up]\ndelay = \"1ms\"\njitter = \"2ms\"", &["up.jitter"]),
            ("carrier = \"emulated\"\n[up]\nqueue = \"9kB\"", &["up.queue", "without a rate"]),
            ("carrier = \"emulated\"\n[up]\nrate = \"1mbit\"\nqueue = \"1kB\"", &["up.queue", "two packets"]),
            ("carrier = \"emulated\"\n[up]\nreorder = { share = \"1%\", by = \"0ms\" }", &["up.reorder.by"]),
            ("carrier = \"emulated\"\n[[end]]\nrank = 1\n[[end]]\nrank = 1", &["rank 1", "twice"]),
            ("carrier = \"emulated\"\n[[end]]\nrank = 1000", &["rank 1000", "at most"]),
            ("carrier = ", &["line 1"]),
        ] {
            let why = parse("x", "x.toml", text).unwrap_err();
            assert!(why.starts_with("x.toml") && parts.iter().all(|part| why.contains(part)), "{text}: {why}");
            assert!(!why.contains('\n'), "{why}");
        }
    }
}
