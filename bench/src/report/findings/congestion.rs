//! Under which congestion controls cells ran, as the connections that carried their bytes tell.

use super::super::digest::{Case, Digest, distinct};
use super::super::links::carrying;
use super::super::text::{count, listed};

/// The congestion controls that a cell's connections named, by their letters; what was asked for, where none did.
pub(crate) fn congestion(case: &Case<'_>) -> Vec<String> {
    let connections = case.good.iter().flat_map(|run| carrying(&case.cell.transport, run.measured));
    let mut names = distinct(connections.map(|one| usual(&one.congestion)).filter(|name| !name.is_empty()));
    names.sort_unstable();
    match names.is_empty() {
        true if case.cell.congestion != "default" => vec![usual(&case.cell.congestion)],
        _ => names,
    }
}

/// As the kernel calls it.
fn usual(name: &str) -> String {
    let name = name.to_lowercase();
    if name == "newreno" { "reno".into() } else { name }
}

/// Connections that ran under another control than their cell asked for.
pub(super) fn others(digest: &Digest<'_>) -> Option<String> {
    let (mut all, mut cells) = (0, Vec::new());
    let mut found: Vec<(String, usize)> = Vec::new();
    for case in digest.cases.iter().filter(|case| case.cell.congestion != "default") {
        let asked = usual(&case.cell.congestion);
        let connections = case.good.iter().flat_map(|run| carrying(&case.cell.transport, run.measured));
        let mut other = 0;
        for name in connections.map(|one| usual(&one.congestion)).filter(|name| !name.is_empty()) {
            all += 1;
            if name == asked {
                continue;
            }
            other += 1;
            let text = format!("{name} instead of {asked}");
            match found.iter_mut().find(|(known, _)| *known == text) {
                Some(known) => known.1 += 1,
                None => found.push((text, 1)),
            }
        }
        if other > 0 {
            cells.push(format!("{} ({other})", digest.label(case.cell)));
        }
    }
    let found: Vec<String> = found.into_iter().map(|(text, number)| format!("{number} {text}")).collect();
    (!found.is_empty()).then(|| {
        format!(
            "Of {} that carry a cell's bytes, some ran under another congestion control than was asked for: {}; in {}.",
            count(all, "connection"),
            found.join(", "),
            listed(&cells, 4)
        )
    })
}

/// The controls of QUIC and of TCP, in pairs of the two.
#[derive(PartialEq)]
pub(super) struct Control {
    quic: Vec<String>,
    tcp: Vec<String>,
}

impl Control {
    pub(super) fn of<'c>(pairs: impl Iterator<Item = (&'c Case<'c>, &'c Case<'c>)> + Clone) -> Self {
        let names = |cases: &mut dyn Iterator<Item = &'c Case<'c>>| {
            let mut names = distinct(cases.flat_map(congestion));
            names.sort_unstable();
            names
        };
        Control { quic: names(&mut pairs.clone().map(|pair| pair.0)), tcp: names(&mut pairs.map(|pair| pair.1)) }
    }

    pub(super) fn differs(&self) -> bool {
        !self.quic.is_empty() && !self.tcp.is_empty() && self.quic != self.tcp
    }

    /// `both under cubic`; empty where neither tells.
    pub(super) fn told(&self) -> String {
        let names = |names: &[String]| if names.is_empty() { "one not known".into() } else { names.join(" and ") };
        match (self.quic.is_empty() && self.tcp.is_empty(), self.quic == self.tcp) {
            (true, _) => String::new(),
            (_, true) => format!("both under {}", names(&self.quic)),
            (_, false) => format!("QUIC under {}, TCP under {}", names(&self.quic), names(&self.tcp)),
        }
    }
}
