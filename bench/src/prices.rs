//! The price list: what each thing between neighbouring rungs of the ladder of transports adds to a step.
//!
//! A price is the difference between two cells that differ in that thing alone, round by round. Where something else differs
//! too, as congestion control or buffers do when nobody sets them, there is no price but a reason.

use std::collections::BTreeSet;

use isocomm::Rung;
use rig::record::{Axis, Cell, LOOPBACK, Record};
use rig::stats::{CellRuns, Comparison, Interval, Keep, Metric, Over, Verdict, cell_runs, compare_paired, summary};
use rig::text;
use serde::Serialize;

/// Everything that the records have a price of.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PriceList {
    pub(crate) metric: Metric,
    pub(crate) prices: Vec<Price>,
    pub(crate) unpriced: Vec<Unpriced>,
}

/// What one thing adds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Price {
    #[serde(flatten)]
    pub(crate) pair: Pair,
    pub(crate) without_it: Interval,
    pub(crate) with_it: Interval,
    /// The cell with it less the one without it.
    pub(crate) comparison: Comparison,
}

/// Neighbours that cannot be compared.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Unpriced {
    #[serde(flatten)]
    pub(crate) pair: Pair,
    pub(crate) why: String,
}

/// Two cells, and the thing by which they differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Pair {
    pub(crate) what: &'static str,
    pub(crate) without: Cell,
    pub(crate) with: Cell,
}

/// What has a price, and the rungs without and with it.
const ITEMS: [(&str, &str, &str); 9] = [
    ("moving bytes through memory", "null", "shm"),
    ("the kernel's TCP stack", "shm", "tcp-raw"),
    ("ZeroMQ", "tcp-raw", "tcp-no-gate"),
    ("TCP, not Unix sockets, under ZeroMQ", "tcp-ipc", "tcp-no-gate"),
    ("the gate", "tcp-no-gate", "tcp"),
    ("QUIC in user space", "tcp-raw", "quic-unprotected"),
    ("packet protection (TLS)", "quic-unprotected", "quic"),
    (SMALL_PACKETS, "quic-unprotected", "quic-unprotected"),
    (SMALL_PACKETS, "quic", "quic"),
];

const SMALL_PACKETS: &str = "1,500-byte packets, not jumbo";

/// The UDP payload of a packet of 1,500 bytes over IPv4.
const SMALL: u64 = 1472;

/// The axes in which neighbours may differ, each with rules of its own.
const OF_TRANSPORTS: [Axis; 3] = [Axis::Transport, Axis::Congestion, Axis::QuicMtu];

/// Links that hold nothing up.
const UNLIMITED: [&str; 2] = [LOOPBACK, "unlimited"];

/// Where our TCP transports say what buffers the kernel granted.
const BUFFERS: &str = "socket buffers (B)";

/// Prices in `metric`, of all neighbours among `records`.
pub(crate) fn price_list(records: &[Record], metric: Metric) -> PriceList {
    let cells = cell_runs(records, Keep::Sound);
    let mut list = PriceList { metric, prices: Vec::new(), unpriced: Vec::new() };
    for (what, without, with) in ITEMS {
        for with in cells.iter().filter(|cell| cell.cell.transport == with) {
            for without in cells.iter().filter(|cell| cell.cell.transport == without && is_one_thing(what, cell, with))
            {
                let pair = Pair { what, without: without.cell.clone(), with: with.cell.clone() };
                match price(metric, &pair, without, with) {
                    Ok(price) => list.prices.push(price),
                    Err(why) => list.unpriced.push(Unpriced { pair, why }),
                }
            }
        }
    }
    list
}

/// Whether the cells are alike but for what the plan says of their transports, and that fits.
fn is_one_thing(what: &str, without: &CellRuns<'_>, with: &CellRuns<'_>) -> bool {
    let (a, b) = (without.cell, with.cell);
    let axes = Axis::ALL.into_iter().filter(|axis| !OF_TRANSPORTS.contains(axis));
    // What goes through memory has no link; next to it is a link without a limit.
    let no_link = is_in_memory(a) && UNLIMITED.contains(&b.link.as_str());
    let mut axes = axes;
    let alike = axes.all(|axis| a.value(axis) == b.value(axis) || axis == Axis::Link && no_link);
    let congestion = a.congestion == b.congestion || is_in_memory(a) || is_in_memory(b);
    let packets = match what {
        SMALL_PACKETS => {
            packet(with).is_some_and(|bytes| bytes <= SMALL) && packet(without).is_none_or(|bytes| bytes > SMALL)
        }
        _ => !is_quic(a) || a.quic_mtu == b.quic_mtu,
    };
    alike && congestion && packets
}

fn price(metric: Metric, pair: &Pair, without: &CellRuns<'_>, with: &CellRuns<'_>) -> Result<Price, String> {
    let same = |what: &str, ours: BTreeSet<String>, theirs: BTreeSet<String>, hint: &str| {
        if ours.is_empty() || theirs.is_empty() || ours == theirs {
            return Ok(());
        }
        let list = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join(", ");
        Err(format!("the {what} differ: {} without it, {} with it{hint}", list(ours), list(theirs)))
    };
    if !is_in_memory(&pair.without) {
        let (ours, theirs) = (congestion(without), congestion(with));
        let is_unknown = ours.is_empty() || theirs.is_empty();
        let hint = "; give the plan's axis `congestion` a value that both have";
        if is_unknown && pair.with.congestion == "default" && is_quic(&pair.without) != is_quic(&pair.with) {
            return Err(format!("the default congestion controls of TCP and QUIC may differ{hint}"));
        }
        same("congestion controls", ours, theirs, hint)?;
    }
    same("socket buffers", facts(without, BUFFERS), facts(with, BUFFERS), "")?;
    let figures = |cell: &CellRuns<'_>| summary(metric, Over::Mean, &cell.runs).map(|summary| summary.interval);
    let comparison = compare_paired(metric, Over::Mean, &without.runs, &with.runs);
    match (figures(without), figures(with), comparison) {
        (Some(without_it), Some(with_it), Some(comparison)) => {
            Ok(Price { pair: pair.clone(), without_it, with_it, comparison })
        }
        _ => Err("no round has good runs of both".into()),
    }
}

/// The names of the congestion controls that the runs' connections used, as far as they tell.
fn congestion(cell: &CellRuns<'_>) -> BTreeSet<String> {
    let ranks = cell.runs.iter().filter_map(|run| run.measured.as_ref()).flat_map(|measured| &measured.ranks);
    let names = ranks.flat_map(|rank| &rank.network.connections).map(|connection| connection.congestion.to_lowercase());
    // QUIC's is called otherwise.
    names.filter(|name| !name.is_empty()).map(|name| if name == "newreno" { "reno".into() } else { name }).collect()
}

/// What the runs' transports say under `name`, where it is what they have and not what they asked for.
fn facts(cell: &CellRuns<'_>, name: &str) -> BTreeSet<String> {
    let facts = cell.runs.iter().filter_map(|run| run.measured.as_ref()).flat_map(|run| &run.transport_facts);
    let values = facts.filter(|(each, _)| each == name).map(|(_, value)| value.clone());
    values.filter(|value| value.starts_with("send ")).collect()
}

/// The largest UDP payload; `None` where nobody says.
fn packet(cell: &CellRuns<'_>) -> Option<u64> {
    let facts = cell.runs.iter().filter_map(|run| run.measured.as_ref()).flat_map(|run| &run.transport_facts);
    let found = facts.filter(|(name, _)| name == "quic.mtu_largest").find_map(|(_, value)| value.parse().ok());
    found.or(cell.cell.quic_mtu.map(u64::from))
}

fn is_in_memory(cell: &Cell) -> bool {
    cell.transport.parse().is_ok_and(Rung::is_in_memory)
}

fn is_quic(cell: &Cell) -> bool {
    cell.transport.parse().is_ok_and(Rung::has_packets)
}

impl PriceList {
    /// As tables, one for cells that are alike but for their transports; `None` where nothing has a price.
    pub(crate) fn render(&self) -> Option<String> {
        let pairs = || self.prices.iter().map(|price| &price.pair).chain(self.unpriced.iter().map(|each| &each.pair));
        let varied = Cell::varied(pairs().map(|pair| &pair.with));
        let axes: Vec<Axis> = varied.into_iter().filter(|axis| !OF_TRANSPORTS.contains(axis)).collect();
        let mut groups: Vec<String> = Vec::new();
        for label in pairs().map(|pair| pair.with.label(&axes)) {
            if !groups.contains(&label) {
                groups.push(label);
            }
        }
        let tables: Vec<String> = groups.iter().map(|group| self.table(group, &axes)).collect();
        (!tables.is_empty()).then(|| tables.join("\n\n"))
    }

    fn table(&self, group: &str, axes: &[Axis]) -> String {
        let unit = self.metric.unit();
        let titles =
            ["without it".to_string(), "with it".into(), "price".into()].map(|title| format!("{title} ({unit})"));
        let [without, with, price] = &titles;
        let header = ["price of", "between", without, with, price, "ratio", "rounds", ""];
        let of_group = self.prices.iter().filter(|price| price.pair.with.label(axes) == group);
        let lines: Vec<_> = of_group.map(|price| price.line(self.metric)).collect();
        let mut text = if group.is_empty() { String::new() } else { format!("{group}\n") };
        if !lines.is_empty() {
            text.push_str(&text::columns(&header, &lines, 2));
        }
        for Unpriced { pair, why } in self.unpriced.iter().filter(|each| each.pair.with.label(axes) == group) {
            text.push_str(&format!("\nno price of {} ({}): {why}", pair.what, pair.between()));
        }
        text.trim_start_matches('\n').to_string()
    }
}

impl Price {
    fn line(&self, metric: Metric) -> [String; 8] {
        let digits = metric.digits(self.with_it.estimate);
        let verdict = match self.comparison.verdict {
            Verdict::Difference(_) => "",
            Verdict::NoSignificantDifference => "not told apart",
            Verdict::TooFewRuns => "too few rounds to tell",
        };
        [
            self.pair.what.into(),
            self.pair.between(),
            format!("{:.digits$}", self.without_it.estimate),
            format!("{:.digits$}", self.with_it.estimate),
            self.comparison.difference.text(digits),
            self.comparison.ratio.map_or("-".into(), |ratio| ratio.text(3)),
            self.comparison.rounds.to_string(),
            verdict.into(),
        ]
    }
}

impl Pair {
    /// `shm → tcp-raw, cubic`: the transports, and the settings of the second one that a plan has set.
    pub(crate) fn between(&self) -> String {
        let Pair { without, with, .. } = self;
        let mut text = format!("{} → {}", without.transport, with.transport);
        if with.congestion != "default" {
            text.push_str(&format!(", {}", with.congestion));
        }
        if let Some(mtu) = with.quic_mtu {
            text.push_str(&format!(", mtu {mtu}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rig::stats::made_up;
    use rig::why::Connection;

    /// Three rounds of a cell over `transport`, whose steps take `ms`, more in later rounds.
    fn runs(transport: &str, ms: f64, change: impl Fn(&mut Record)) -> Vec<Record> {
        let cell = Cell { transport: transport.into(), ..made_up::cell("ddp") };
        let round = |round: u32| {
            let steps: Vec<f64> = (0..12).map(|step| ms + f64::from(round) + f64::from(step % 3) / 10.0).collect();
            let mut record = made_up::record(cell.clone(), round, &steps);
            change(&mut record);
            record
        };
        (1..=3).map(round).collect()
    }

    fn under(congestion: &'static str) -> impl Fn(&mut Record) {
        move |record| {
            record.cell.congestion = congestion.into();
            for rank in record.measured.iter_mut().flat_map(|measured| &mut measured.ranks) {
                let name = if congestion == "default" { record.cell.transport.as_str() } else { congestion };
                rank.network.connections = vec![Connection { congestion: name.into(), ..Connection::default() }];
            }
        }
    }

    fn what(list: &PriceList) -> Vec<(&str, f64)> {
        let price = |price: &Price| (price.pair.what, price.comparison.difference.estimate.round());
        list.prices.iter().map(price).collect()
    }

    #[test]
    fn every_neighbour_has_its_price() {
        let plain = |_: &mut Record| {};
        let mut records = [runs("null", 10.0, plain), runs("shm", 12.0, plain), runs("tcp-ipc", 16.0, plain)].concat();
        let on_network =
            [("tcp-raw", 15.0), ("tcp-no-gate", 19.0), ("tcp", 24.0), ("quic-unprotected", 30.0), ("quic", 38.0)];
        records.extend(on_network.into_iter().flat_map(|(name, ms)| runs(name, ms, under("cubic"))));
        records.extend(runs("quic", 50.0, |record| {
            under("cubic")(record);
            record.cell.quic_mtu = Some(1472);
        }));
        let list = price_list(&records, Metric::Step);
        let expected = [
            ("moving bytes through memory", 2.0),
            ("the kernel's TCP stack", 3.0),
            ("ZeroMQ", 4.0),
            ("TCP, not Unix sockets, under ZeroMQ", 3.0),
            ("the gate", 5.0),
            ("QUIC in user space", 15.0),
            ("packet protection (TLS)", 8.0),
            (SMALL_PACKETS, 12.0),
        ];
        assert_eq!(what(&list), expected);
        assert!(list.unpriced.is_empty());
        let text = list.render().unwrap();
        assert_eq!(text.lines().count(), 9, "{text}");
        assert!(text.contains("quic → quic, cubic, mtu 1472") && text.contains("null → shm "), "{text}");
        assert!(serde_json::to_value(&list).unwrap()["prices"][0]["what"].is_string());
    }

    #[test]
    fn what_differs_in_something_else_has_a_reason_instead_of_a_price() {
        let buffers = |bytes: u32| {
            move |record: &mut Record| {
                let facts = vec![(BUFFERS.to_string(), format!("send {bytes}, receive {bytes}"))];
                record.measured.as_mut().unwrap().transport_facts = facts;
            }
        };
        // TCP and QUIC by default, and a gate with other buffers.
        let records = [
            runs("tcp-raw", 1.0, under("default")),
            runs("quic-unprotected", 2.0, under("default")),
            runs("tcp-no-gate", 3.0, buffers(1 << 20)),
            runs("tcp", 4.0, buffers(2 << 20)),
        ]
        .concat();
        let list = price_list(&records, Metric::Step);
        let reasons: Vec<&str> = list.unpriced.iter().map(|each| each.why.as_str()).collect();
        assert_eq!(what(&list), [("ZeroMQ", 2.0)]);
        assert!(
            reasons[0].starts_with("the socket buffers differ: send 1048576, receive 1048576 without it"),
            "{reasons:?}"
        );
        assert!(reasons[1].contains("quic-unprotected with it; give the plan's axis `congestion`"), "{reasons:?}");
        let silent = [runs("tcp-raw", 1.0, |_| {}), runs("quic-unprotected", 2.0, |_| {})].concat();
        let list = price_list(&silent, Metric::Step);
        assert!(list.prices.is_empty() && list.unpriced[0].why.contains("may differ"));
        assert!(list.render().unwrap().contains("no price of QUIC in user space"));
    }

    #[test]
    fn cells_of_other_links_lanes_and_packets_are_no_neighbours() {
        let changed = |change: fn(&mut Cell)| {
            move |record: &mut Record| {
                change(&mut record.cell);
            }
        };
        for change in [|cell: &mut Cell| cell.link = "wan".into(), |cell: &mut Cell| cell.lanes = 4] {
            let records = [runs("shm", 1.0, |_| {}), runs("tcp-raw", 2.0, changed(change))].concat();
            assert_eq!(price_list(&records, Metric::Step).render(), None);
        }
        let small = changed(|cell| cell.quic_mtu = Some(1200));
        let records = [runs("quic-unprotected", 1.0, |_| {}), runs("quic", 2.0, small)].concat();
        assert_eq!(price_list(&records, Metric::Step).render(), None);
    }

    #[test]
    fn strategies_are_listed_apart() {
        let ring = |record: &mut Record| record.cell.strategy = "ring".into();
        let records = ["null", "shm"].into_iter().flat_map(|name| [runs(name, 1.0, |_| {}), runs(name, 2.0, ring)]);
        let text = price_list(&records.flatten().collect::<Vec<_>>(), Metric::Step).render().unwrap();
        let tables: Vec<&str> = text.split("\n\n").collect();
        assert!(tables[0].starts_with("ddp\n") && tables[1].starts_with("ring\n"), "{text}");
    }
}
