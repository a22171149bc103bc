//! Slurm's lists of hosts, such as `rack[1-2]node[08-11],login`.

use std::str::FromStr;

use super::MAX_WORLD_SIZE;
use crate::error::{Error, Result};

/// A list of hosts as Slurm writes it, for instance in `SLURM_JOB_NODELIST`.
///
/// Commas separate; brackets hold numbers and ranges of numbers, which keep the digits of their first number (`[08-11]`: 08, 09, 10, 11); of
/// several brackets the last one runs fastest, and then the first one. That is how `scontrol show hostnames` orders them.
///
/// ```
/// let list: comm_core::job::HostList = "gpu[08-10],login".parse().unwrap();
/// assert_eq!(list.hosts().collect::<Vec<_>>(), ["gpu08", "gpu09", "gpu10", "login"]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostList {
    /// At least one.
    parts: Vec<Part>,
}

/// What stands between commas.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    /// Text, and the numbers that come behind it.
    pieces: Vec<(String, Vec<Range>)>,
    rest: String,
    count: usize,
}

/// Numbers that follow one another, of at least so many digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: u64,
    count: usize,
    digits: usize,
}

impl HostList {
    /// How many hosts there are: 1 to [`MAX_WORLD_SIZE`].
    pub fn count(&self) -> usize {
        self.parts.iter().map(|part| part.count).sum()
    }

    /// Their names, in order.
    pub fn hosts(&self) -> impl Iterator<Item = String> {
        self.parts.iter().flat_map(|part| (0..part.count).map(|number| part.host(number)))
    }
}

impl FromStr for HostList {
    type Err = Error;

    /// # Errors
    /// [`Error::InvalidArgument`] saying what is wrong.
    fn from_str(text: &str) -> Result<Self> {
        let parts = split(text).and_then(|items| {
            let mut count = 0;
            let mut parts = Vec::with_capacity(items.len());
            for item in items {
                let part = Part::parse(item)?;
                count += part.count;
                if count > MAX_WORLD_SIZE {
                    return Err(too_many());
                }
                parts.push(part);
            }
            Ok(parts)
        });
        let shown: String = text.chars().take(100).collect();
        parts
            .map(|parts| HostList { parts })
            .map_err(|why| Error::invalid(format!("'{shown}' is not a list of hosts: {why}")))
    }
}

impl Part {
    fn parse(item: &str) -> Result<Self, String> {
        let (mut pieces, mut rest, mut count) = (Vec::new(), item, 1usize);
        while let Some((before, after)) = rest.split_once('[') {
            let Some((inside, after)) = after.split_once(']') else { return Err("a bracket is not closed".into()) };
            let ranges = inside.split(',').map(Range::parse).collect::<Result<Vec<_>, _>>()?;
            let numbers = ranges.iter().fold(0usize, |sum, range| sum.saturating_add(range.count));
            count = count.saturating_mul(numbers);
            if count > MAX_WORLD_SIZE {
                return Err(too_many());
            }
            pieces.push((before.to_string(), ranges));
            rest = after;
        }
        Ok(Part { pieces, rest: rest.to_string(), count })
    }

    /// The host of that number, below `count`.
    fn host(&self, number: usize) -> String {
        let numbers_of = |bracket: usize| self.pieces.get(bracket).map_or(&[][..], |(_, ranges)| ranges);
        let mut chosen = vec![String::new(); self.pieces.len()];
        let mut left = number;
        // From the bracket that runs fastest to the slowest.
        let last = self.pieces.len().checked_sub(1);
        for bracket in last.into_iter().chain(0..last.unwrap_or(0)) {
            let ranges = numbers_of(bracket);
            let count: usize = ranges.iter().map(|range| range.count).sum();
            if let Some(slot) = chosen.get_mut(bracket) {
                *slot = number_at(ranges, left % count.max(1));
            }
            left /= count.max(1);
        }
        let words = self.pieces.iter().map(|(word, _)| word.as_str());
        words.zip(&chosen).flat_map(|(word, number)| [word, number]).chain([self.rest.as_str()]).collect()
    }
}

impl Range {
    fn parse(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err(format!("the range {text} ends before it begins"));
        }
        match usize::try_from(to - from) {
            Ok(more) if more < MAX_WORLD_SIZE => Ok(Range { first: from, count: more + 1, digits: first.len() }),
            _ => Err(too_many()),
        }
    }
}

/// The number at `place` of those in a bracket, with its zeros.
fn number_at(ranges: &[Range], mut place: usize) -> String {
    for Range { first, count, digits } in ranges {
        if place < *count {
            return format!("{:0digits$}", first + place as u64);
        }
        place -= count;
    }
    String::new()
}

/// The parts between commas outside of brackets.
fn split(list: &str) -> Result<Vec<&str>, String> {
    let (mut items, mut begin, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if inside => return Err("it has brackets within brackets".into()),
            b']' if !inside => return Err("it closes a bracket that is not open".into()),
            b'[' | b']' => inside = !inside,
            b',' if !inside => {
                items.push(list.get(begin..at).unwrap_or_default());
                begin = at + 1;
            }
            _ if byte.is_ascii_whitespace() || byte.is_ascii_control() => return Err("it has white space in it".into()),
            _ => {}
        }
    }
    if inside {
        return Err("a bracket is not closed".into());
    }
    items.push(list.get(begin..).unwrap_or_default());
    match items.iter().any(|item| item.is_empty()) {
        true => Err("a host has no name".into()),
        false => Ok(items),
    }
}

fn number(text: &str) -> Result<u64, String> {
    // No more digits than fit, with or without zeros before them.
    let is_number = (1..=18).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = if is_number { text.parse().ok() } else { None };
    number.ok_or_else(|| format!("'{text}' in brackets is not a number"))
}

fn too_many() -> String {
    format!("it stands for more than {MAX_WORLD_SIZE} hosts")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expand(list: &str) -> Result<Vec<String>> {
        let list: HostList = list.parse()?;
        let hosts: Vec<String> = list.hosts().collect();
        assert_eq!(list.count(), hosts.len());
        Ok(hosts)
    }

    #[test]
    fn lists_are_those_of_scontrol() {
        // As `scontrol show hostnames` of Slurm 22.05 prints them.
        for (list, hosts) in [
            ("node1", "node1"),
            ("n1,n2", "n1 n2"),
            ("n[1-3]", "n1 n2 n3"),
            ("n[08-11]", "n08 n09 n10 n11"),
            ("n[9-11]", "n9 n10 n11"),
            ("n[001-003,7],x", "n001 n002 n003 n7 x"),
            ("a[1-2]b[1-2]", "a1b1 a1b2 a2b1 a2b2"),
            ("a[1-2][3-4]", "a13 a14 a23 a24"),
            ("a[1-2]b[1-2]c[3-4]", "a1b1c3 a1b1c4 a2b1c3 a2b1c4 a1b2c3 a1b2c4 a2b2c3 a2b2c4"),
            ("n[3,1]", "n3 n1"),
            ("n1,n1", "n1 n1"),
            ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
        ] {
            assert_eq!(expand(list).unwrap().join(" "), hosts, "{list}");
        }
        // Later versions have names that go on behind brackets.
        assert_eq!(expand("n[1-2]-ib,gpu-a[3]").unwrap(), ["n1-ib", "n2-ib", "gpu-a3"]);
    }

    #[test]
    fn what_is_no_list_says_what_is_wrong() {
        for (list, what) in [
            ("", "no name"),
            ("a,,b", "no name"),
            ("a,", "no name"),
            ("a[1-2", "not closed"),
            ("a1-2]", "not open"),
            ("a[1,[2-3]]", "within brackets"),
            ("a[]", "'' in brackets"),
            ("a[1-]", "'' in brackets"),
            ("a[x]", "'x' in brackets"),
            ("a[1-2-3]", "'2-3' in brackets"),
            ("a[-1]", "'' in brackets"),
            ("a[3-1]", "3-1 ends before"),
            ("a[0-65536]", "more than 65536"),
            ("a[0-65535],b", "more than 65536"),
            ("a[1-1000]b[1-1000]", "more than 65536"),
            ("a[0-999999999999999999]", "more than 65536"),
            ("a[99999999999999999999]", "not a number"),
            ("a b", "white space"),
        ] {
            let error = expand(list).unwrap_err().to_string();
            assert!(error.contains(what), "{list}: {error}");
        }
    }

    /// One part of a list, with the hosts that it stands for: text, and after each piece of it numbers.
    fn part() -> impl Strategy<Value = (String, Vec<String>)> {
        let range = (0u64..200, 0u64..4, 0usize..3).prop_map(|(first, more, zeros)| {
            let first_text = format!("{}{first}", "0".repeat(zeros));
            let width = first_text.len();
            let numbers: Vec<String> = (first..=first + more).map(|number| format!("{number:0>width$}")).collect();
            let text = if more == 0 { first_text } else { format!("{first_text}-{:0>width$}", first + more) };
            (text, numbers)
        });
        let ranges = prop::collection::vec(range, 1..4).prop_map(|ranges| {
            let text: Vec<String> = ranges.iter().map(|(text, _)| text.clone()).collect();
            (format!("[{}]", text.join(",")), ranges.into_iter().flat_map(|(_, numbers)| numbers).collect::<Vec<_>>())
        });
        let pieces = prop::collection::vec(("[a-z][a-z-]{0,3}", ranges), 0..3);
        (pieces, "[a-z]{1,3}").prop_map(|(pieces, end)| {
            let text: String = pieces.iter().map(|(word, (brackets, _))| format!("{word}{brackets}")).collect();
            let hosts = match pieces.as_slice() {
                [] => vec![end.clone()],
                [(word, (_, numbers))] => numbers.iter().map(|number| format!("{word}{number}{end}")).collect(),
                [(one, (_, first)), (two, (_, last)), ..] => {
                    let host = |a: &String, b: &String| format!("{one}{a}{two}{b}{end}");
                    first.iter().flat_map(|a| last.iter().map(|b| host(a, b)).collect::<Vec<_>>()).collect()
                }
            };
            (text + &end, hosts)
        })
    }

    proptest! {
        #[test]
        fn a_list_stands_for_what_it_was_made_of(parts in prop::collection::vec(part(), 1..4)) {
            let text: Vec<String> = parts.iter().map(|(text, _)| text.clone()).collect();
            let hosts: Vec<String> = parts.into_iter().flat_map(|(_, hosts)| hosts).collect();
            prop_assert_eq!(expand(&text.join(",")).unwrap(), hosts);
        }

        #[test]
        fn any_text_is_hosts_or_an_error(text in "[a-c0-9,\\[\\]-]{0,24}") {
            if let Ok(hosts) = expand(&text) {
                prop_assert!(!hosts.is_empty() && hosts.len() <= MAX_WORLD_SIZE);
                prop_assert!(hosts.iter().all(|host| !host.is_empty() && !host.contains([',', '[', ']'])));
            }
        }
    }
}
