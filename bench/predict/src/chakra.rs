//! Traces as Chakra execution traces of MLCommons: one file `PREFIX.RANK.et` for each rank, which is a sequence of protobuf messages, each
//! after its length as a varint: the metadata, then a node each.
//!
//! Schema: <https://github.com/mlcommons/chakra>, `schema/protobuf/et_def.proto`. Attributes are those that ASTRA-sim's feeder reads:
//! `is_cpu_op`, `comm_type`, `comm_size`, `comm_src`, `comm_dst`, `comm_tag`, `pg_name`; `comm_size` is the size of what goes in on a rank, so that
//! of an all-gather it is a shard. Chakra's times are whole microseconds. What it has no place for stands in attributes of our own, whose
//! names begin with `isocomm.`: nanoseconds, element type and number, root, algorithm, lane, and whether the caller goes on meanwhile. Without them an operation is taken to be on f32, and runs
//! by the table's algorithm on lane 0.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use comm_core::{DType, OpKind};
use prost::Message as _;

use crate::trace::{Collective, Message, Node, RankTrace, Recorded, Trace, Work};

/// The version of Chakra's schema that is written.
const VERSION: &str = "1.0.0";

/// Longest file that is read: 1 GiB.
const MOST_BYTES: u64 = 1 << 30;

/// Ranks of a trace that is read, at most.
const MOST_RANKS: usize = 1 << 16;

#[derive(Clone, PartialEq, prost::Message)]
struct GlobalMetadata {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(message, repeated, tag = "2")]
    attr: Vec<Attribute>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Attribute {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(oneof = "Value", tags = "3, 5, 7, 9, 11, 13, 15, 17, 27, 29")]
    value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Value {
    #[prost(double, tag = "3")]
    Double(f64),
    #[prost(float, tag = "5")]
    Float(f32),
    #[prost(int32, tag = "7")]
    Int32(i32),
    #[prost(int64, tag = "9")]
    Int64(i64),
    #[prost(uint32, tag = "11")]
    Uint32(u32),
    #[prost(uint64, tag = "13")]
    Uint64(u64),
    #[prost(sint32, tag = "15")]
    Sint32(i32),
    #[prost(sint64, tag = "17")]
    Sint64(i64),
    #[prost(bool, tag = "27")]
    Bool(bool),
    #[prost(string, tag = "29")]
    Text(String),
}

#[derive(Clone, PartialEq, prost::Message)]
struct ChakraNode {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(int32, tag = "3")]
    kind: i32,
    #[prost(uint64, repeated, tag = "4")]
    ctrl_deps: Vec<u64>,
    #[prost(uint64, repeated, tag = "5")]
    data_deps: Vec<u64>,
    #[prost(uint64, tag = "6")]
    start_time_micros: u64,
    #[prost(uint64, tag = "7")]
    duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    attr: Vec<Attribute>,
}

const METADATA: i32 = 1;
const MEM_LOAD: i32 = 2;
const MEM_STORE: i32 = 3;
const COMP: i32 = 4;
const SEND: i32 = 5;
const RECV: i32 = 6;
const COLL: i32 = 7;

/// Chakra's number of each collective; reduce-scatter has a second one.
const COLLECTIVES: [(u64, OpKind); 10] = [
    (0, OpKind::AllReduce),
    (1, OpKind::Reduce),
    (2, OpKind::AllGather),
    (3, OpKind::Gather),
    (4, OpKind::Scatter),
    (5, OpKind::Broadcast),
    (6, OpKind::AllToAll),
    (7, OpKind::ReduceScatter),
    (8, OpKind::ReduceScatter),
    (9, OpKind::Barrier),
];

/// Why there is no trace in a file.
#[derive(Debug)]
pub struct ChakraError {
    file: PathBuf,
    what: String,
}

impl fmt::Display for ChakraError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, whatever a file calls its nodes.
        let what = self.what.chars().map(|each| if each.is_control() { ' ' } else { each });
        write!(f, "{}: {}", self.file.display(), what.collect::<String>())
    }
}

impl std::error::Error for ChakraError {}

/// Writes one file for each rank, `folder/prefix.RANK.et`.
///
/// # Errors
/// The trace refers to what it does not have, or a file cannot be written.
pub fn write(trace: &Trace, folder: &Path, prefix: &str) -> Result<(), ChakraError> {
    let failed = |file: PathBuf, what: String| Err(ChakraError { file, what });
    if let Err(why) = trace.check() {
        return failed(folder.join(prefix), why.to_string());
    }
    let groups = trace.groups();
    for (rank, ranks) in trace.ranks.iter().enumerate() {
        let file = folder.join(format!("{prefix}.{rank}.et"));
        if let Err(error) = std::fs::write(&file, encode(trace, rank, ranks, &groups)) {
            return failed(file, error.to_string());
        }
    }
    Ok(())
}

/// Reads the trace whose files are `path.RANK.et`, or the one in the folder `path`. Files of other programs are read too.
///
/// # Errors
/// The first thing that is wrong, with the file's name: no files, a rank that is missing, a message that is cut or is none, nodes that wait for each other
/// or for nodes that are not there, operations without their size.
pub fn read(path: &Path) -> Result<Trace, ChakraError> {
    let files = files(path)?;
    let mut read = Vec::with_capacity(files.len());
    for file in files {
        let wrong = |what: String| ChakraError { file: file.clone(), what };
        let length = std::fs::metadata(&file).map_err(|error| wrong(error.to_string()))?.len();
        if length > MOST_BYTES {
            return Err(wrong(format!("it has {length} bytes, and at most {MOST_BYTES} can be read")));
        }
        let bytes = std::fs::read(&file).map_err(|error| wrong(error.to_string()))?;
        read.push((file.clone(), decode(&bytes).and_then(sorted).map_err(wrong)?));
    }
    join(path, read)
}

/// As [`read`], of the contents of the ranks' files.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn of_bytes(path: &Path, ranks: &[&[u8]]) -> Result<Trace, ChakraError> {
    let decoded = |(rank, bytes): (usize, &&[u8])| {
        let file = path.with_extension(format!("{rank}.et"));
        let decoded = decode(bytes).and_then(sorted);
        decoded.map(|decoded| (file.clone(), decoded)).map_err(|what| ChakraError { file, what })
    };
    join(path, ranks.iter().enumerate().map(decoded).collect::<Result<_, _>>()?)
}

/// The contents of one rank's file.
pub(crate) fn encode(trace: &Trace, rank: usize, of_rank: &RankTrace, groups: &[Vec<usize>]) -> Vec<u8> {
    let attr = vec![text("isocomm.name", &trace.name), unsigned("isocomm.steps", trace.steps)];
    let mut bytes = GlobalMetadata { version: VERSION.into(), attr }.encode_length_delimited_to_vec();
    for (index, node) in of_rank.nodes.iter().enumerate() {
        bytes.extend(chakra_node(rank, index, node, trace.ranks.len(), groups).encode_length_delimited_to_vec());
    }
    bytes
}

fn chakra_node(rank: usize, index: usize, node: &Node, ranks: usize, groups: &[Vec<usize>]) -> ChakraNode {
    // Chakra's numbers of nodes begin at 1 in some readers, which take 0 for none.
    let id = |index: usize| index as u64 + 1;
    let recorded = node.recorded.unwrap_or(Recorded { began_ns: 0, took_ns: 0 });
    let mut attr = vec![Attribute { name: "is_cpu_op".into(), value: Some(Value::Bool(false)) }];
    let mut micros = recorded.took_ns / 1000;
    let kind = match &node.work {
        Work::Compute { ns } => {
            attr.push(unsigned("isocomm.ns", *ns));
            attr.push(signed("num_ops", 0));
            micros = ns.div_ceil(1000);
            COMP
        }
        Work::Send(message) => {
            message_attributes(&mut attr, message, (rank, message.peer));
            SEND
        }
        Work::Receive(message) => {
            message_attributes(&mut attr, message, (message.peer, rank));
            RECV
        }
        Work::Collective(collective) => {
            collective_attributes(&mut attr, collective, ranks, groups);
            COLL
        }
    };
    if let Some(Recorded { began_ns, took_ns }) = node.recorded {
        attr.push(unsigned("isocomm.began_ns", began_ns));
        attr.push(unsigned("isocomm.took_ns", took_ns));
    }
    ChakraNode {
        id: id(index),
        name: node.name.clone(),
        kind,
        ctrl_deps: Vec::new(),
        data_deps: node.after.iter().map(|after| id(*after)).collect(),
        start_time_micros: recorded.began_ns / 1000,
        duration_micros: micros,
        attr,
    }
}

fn message_attributes(attr: &mut Vec<Attribute>, message: &Message, (from, to): (usize, usize)) {
    attr.push(signed("comm_size", message.bytes as i64));
    for (name, value) in [("comm_src", from), ("comm_dst", to), ("comm_tag", message.lane)] {
        attr.push(Attribute { name: name.into(), value: Some(Value::Int32(value as i32)) });
    }
    attr.push(unsigned("isocomm.background", u64::from(message.background)));
}

fn collective_attributes(attr: &mut Vec<Attribute>, collective: &Collective, ranks: usize, groups: &[Vec<usize>]) {
    let Collective { kind, dtype, count, root, algorithm, group, lane, background } = collective;
    let number = COLLECTIVES.iter().find(|(_, each)| each == kind).map_or(0, |(number, _)| *number);
    let members = if group.is_empty() { ranks } else { group.len() };
    attr.push(signed("comm_type", number as i64));
    attr.push(signed("comm_size", (count.div_ceil(shares(*kind, members)) * dtype.size()) as i64));
    if let Some(index) = groups.iter().position(|each| each == group) {
        attr.push(text("pg_name", &index.to_string()));
    }
    attr.push(text("isocomm.dtype", dtype.name()));
    attr.push(unsigned("isocomm.count", *count as u64));
    attr.push(unsigned("isocomm.root", *root as u64));
    attr.push(unsigned("isocomm.lane", *lane as u64));
    attr.push(unsigned("isocomm.background", u64::from(*background)));
    if let Some(algorithm) = algorithm {
        attr.push(text("isocomm.algorithm", algorithm.name()));
    }
}

/// By how much what goes in on a rank is less than the whole.
fn shares(kind: OpKind, members: usize) -> usize {
    if matches!(kind, OpKind::AllGather | OpKind::Gather) { members.max(1) } else { 1 }
}

fn text(name: &str, value: &str) -> Attribute {
    Attribute { name: name.into(), value: Some(Value::Text(value.into())) }
}

fn signed(name: &str, value: i64) -> Attribute {
    Attribute { name: name.into(), value: Some(Value::Int64(value)) }
}

fn unsigned(name: &str, value: u64) -> Attribute {
    Attribute { name: name.into(), value: Some(Value::Uint64(value)) }
}

/// The files of a trace, by rank.
fn files(path: &Path) -> Result<Vec<PathBuf>, ChakraError> {
    let wrong = |what: String| ChakraError { file: path.to_owned(), what };
    let (folder, prefix) = if path.is_dir() {
        (path.to_owned(), None)
    } else {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        (folder.to_owned(), path.file_name().map(|name| name.to_string_lossy().into_owned()))
    };
    let entries = std::fs::read_dir(&folder).map_err(|error| wrong(error.to_string()))?;
    let mut found: BTreeMap<String, BTreeMap<usize, PathBuf>> = BTreeMap::new();
    for entry in entries {
        let file = entry.map_err(|error| wrong(error.to_string()))?.path();
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let parts = name.strip_suffix(".et").and_then(|stem| stem.rsplit_once('.'));
        if let Some((stem, rank)) = parts
            && let Ok(rank) = rank.parse::<usize>()
            && prefix.as_ref().is_none_or(|prefix| prefix == stem)
        {
            found.entry(stem.to_owned()).or_default().insert(rank, file);
        }
    }
    if found.len() > 1 {
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        return Err(wrong(format!("there are several traces in this folder: name one of {}", names.join(", "))));
    }
    let Some((_, files)) = found.into_iter().next() else {
        return Err(wrong("there are no files of a Chakra trace, PREFIX.RANK.et".into()));
    };
    if files.len() > MOST_RANKS {
        return Err(wrong(format!("it has {} ranks, and at most {MOST_RANKS} are possible", files.len())));
    }
    match files.keys().zip(0..).find(|(rank, expected)| *rank != expected) {
        Some((_, missing)) => Err(wrong(format!("the file of rank {missing} is missing"))),
        None => Ok(files.into_values().collect()),
    }
}

fn decode(mut bytes: &[u8]) -> Result<(GlobalMetadata, Vec<ChakraNode>), String> {
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return Err("it is compressed; unpack it with gunzip".into());
    }
    let total = bytes.len();
    let mut next = |what: &str| -> Result<Option<&[u8]>, String> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let at = total - bytes.len();
        let length =
            prost::decode_length_delimiter(&mut bytes).map_err(|error| format!("byte {at}: {what}: {error}"))?;
        if length > bytes.len() {
            let left = bytes.len();
            return Err(format!(
                "byte {at}: {what} of {length} bytes, but only {left} are left: the file is cut off, or not a Chakra trace"
            ));
        }
        let (message, rest) = bytes.split_at(length);
        bytes = rest;
        Ok(Some(message))
    };
    let metadata = next("the metadata")?.ok_or("it is empty")?;
    let metadata = GlobalMetadata::decode(metadata).map_err(|error| format!("the metadata: {error}"))?;
    let mut nodes: Vec<ChakraNode> = Vec::new();
    while let Some(message) = next("a node")? {
        let count = nodes.len();
        nodes.push(ChakraNode::decode(message).map_err(|error| format!("node {count} of the file: {error}"))?);
    }
    Ok((metadata, nodes))
}

type Decoded = (GlobalMetadata, Vec<(ChakraNode, Vec<usize>)>);

/// The nodes in an order in which each comes after what it waits for, with the places of those; where that leaves a choice, as in the file.
fn sorted((metadata, nodes): (GlobalMetadata, Vec<ChakraNode>)) -> Result<Decoded, String> {
    let mut places: HashMap<u64, usize> = HashMap::with_capacity(nodes.len());
    for (place, node) in nodes.iter().enumerate() {
        if places.insert(node.id, place).is_some() {
            return Err(format!("there are two nodes {}", node.id));
        }
    }
    let mut missing = vec![0; nodes.len()];
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (place, node) in nodes.iter().enumerate() {
        for dependency in node.ctrl_deps.iter().chain(&node.data_deps) {
            let Some(of) = places.get(dependency) else {
                return Err(format!(
                    "node {} ({}) waits for node {dependency}, which is not there",
                    node.id, node.name
                ));
            };
            followers[*of].push(place);
            missing[place] += 1;
        }
    }
    let mut ready: std::collections::BinaryHeap<std::cmp::Reverse<usize>> = std::collections::BinaryHeap::new();
    ready.extend((0..nodes.len()).filter(|place| missing[*place] == 0).map(std::cmp::Reverse));
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(std::cmp::Reverse(place)) = ready.pop() {
        order.push(place);
        for follower in &followers[place] {
            missing[*follower] -= 1;
            if missing[*follower] == 0 {
                ready.push(std::cmp::Reverse(*follower));
            }
        }
    }
    if order.len() < nodes.len() {
        let stuck = missing.iter().position(|missing| *missing > 0).and_then(|place| nodes.get(place));
        let name = stuck.map_or(String::new(), |node| format!("{} ({})", node.id, node.name));
        return Err(format!("some nodes wait for each other in a circle; node {name} is one of them"));
    }
    let mut new_places = vec![0; nodes.len()];
    for (place, old) in order.iter().enumerate() {
        new_places[*old] = place;
    }
    let mut nodes: Vec<Option<ChakraNode>> = nodes.into_iter().map(Some).collect();
    let mut in_order = Vec::with_capacity(nodes.len());
    for old in order {
        let Some(node) = nodes[old].take() else { continue };
        let after = node.ctrl_deps.iter().chain(&node.data_deps).filter_map(|id| places.get(id));
        let mut after: Vec<usize> = after.map(|old| new_places[*old]).collect();
        after.sort_unstable();
        after.dedup();
        in_order.push((node, after));
    }
    Ok((metadata, in_order))
}

/// A trace of the files of all ranks.
fn join(path: &Path, files: Vec<(PathBuf, Decoded)>) -> Result<Trace, ChakraError> {
    // A group has the ranks whose files name it.
    let mut groups: HashMap<String, Vec<usize>> = HashMap::new();
    for (rank, (_, (_, nodes))) in files.iter().enumerate() {
        let names = nodes.iter().filter(|(node, _)| node.kind == COLL).filter_map(|(node, _)| node.text("pg_name"));
        for name in names {
            let ranks = groups.entry(name.to_owned()).or_default();
            if ranks.last() != Some(&rank) {
                ranks.push(rank);
            }
        }
    }
    let ranks = files.len();
    groups.retain(|_, members| members.len() < ranks);
    let mut trace = Trace { name: String::new(), steps: 1, ranks: Vec::with_capacity(ranks) };
    for (rank, (file, (metadata, nodes))) in files.into_iter().enumerate() {
        let wrong = |what: String| ChakraError { file: file.clone(), what };
        if rank == 0 {
            trace.name = find_text(&metadata.attr, "isocomm.name").map_or(path.display().to_string(), String::from);
            trace.steps = find(&metadata.attr, "isocomm.steps").unwrap_or(1).max(1);
        }
        let mut of_rank = RankTrace { nodes: Vec::with_capacity(nodes.len()) };
        for (node, after) in nodes {
            let (id, name) = (node.id, node.name.clone());
            let work = node.work(ranks, &groups).map_err(|what| wrong(format!("node {id} ({name}): {what}")))?;
            let recorded = node.recorded();
            of_rank.nodes.push(Node { name, after, work, recorded });
        }
        trace.ranks.push(of_rank);
    }
    trace.check().map_err(|why| ChakraError { file: path.to_owned(), what: why.to_string() })?;
    Ok(trace)
}

impl ChakraNode {
    fn find(&self, name: &str) -> Option<u64> {
        find(&self.attr, name)
    }

    fn text(&self, name: &str) -> Option<&str> {
        find_text(&self.attr, name)
    }

    fn recorded(&self) -> Option<Recorded> {
        let times = self.find("isocomm.began_ns").zip(self.find("isocomm.took_ns"));
        times.map(|(began_ns, took_ns)| Recorded { began_ns, took_ns })
    }

    fn work(&self, ranks: usize, groups: &HashMap<String, Vec<usize>>) -> Result<Work, String> {
        let needed = |name: &str| self.find(name).ok_or_else(|| format!("it has no attribute {name}"));
        // What other programs trace has its dependencies, and nothing that a caller stands still for beyond them.
        let background = self.find("isocomm.background") != Some(0);
        match self.kind {
            COMP => {
                let of_micros = self.duration_micros.checked_mul(1000).ok_or("a duration is too long")?;
                Ok(Work::Compute { ns: self.find("isocomm.ns").unwrap_or(of_micros) })
            }
            // What only says something, or moves between memories of one rank, takes the time that it took.
            METADATA | MEM_LOAD | MEM_STORE => Ok(Work::Compute { ns: self.duration_micros.saturating_mul(1000) }),
            SEND | RECV => {
                let bytes = needed("comm_size")?;
                let lane = self.find("comm_tag").filter(|lane| *lane < 64).unwrap_or(0) as usize;
                let peer = needed(if self.kind == SEND { "comm_dst" } else { "comm_src" })? as usize;
                let message = Message { peer, bytes, lane, background };
                Ok(if self.kind == SEND { Work::Send(message) } else { Work::Receive(message) })
            }
            COLL => {
                let number = needed("comm_type")?;
                let known = COLLECTIVES.iter().find(|(each, _)| *each == number);
                let kind = known.map(|(_, kind)| *kind).ok_or_else(|| format!("unknown collective {number}"))?;
                let group = self.text("pg_name").and_then(|name| groups.get(name)).cloned().unwrap_or_default();
                let members = if group.is_empty() { ranks } else { group.len() };
                let dtype = self.text("isocomm.dtype").map_or(Ok(DType::F32), str::parse);
                let dtype = dtype.map_err(|error| error.to_string())?;
                let size = if kind == OpKind::Barrier { 0 } else { needed("comm_size")? };
                let whole = size.checked_mul(shares(kind, members) as u64).ok_or("a size does not fit into 64 bits")?;
                let count = self.find("isocomm.count").unwrap_or(whole.div_ceil(dtype.size() as u64)) as usize;
                let algorithm = self.text("isocomm.algorithm").map(str::parse).transpose();
                let algorithm = algorithm.map_err(|error: comm_core::UnknownName| error.to_string())?;
                let root = self.find("isocomm.root").unwrap_or(0) as usize;
                let lane = self.find("isocomm.lane").unwrap_or(0) as usize;
                Ok(Work::Collective(Collective { kind, dtype, count, root, algorithm, group, lane, background }))
            }
            other => Err(format!("unknown type of node {other}")),
        }
    }
}

/// A whole number that is not negative, of whichever type.
fn find(attributes: &[Attribute], name: &str) -> Option<u64> {
    let attribute = attributes.iter().find(|attribute| attribute.name == name)?;
    match attribute.value.as_ref()? {
        Value::Int32(value) | Value::Sint32(value) => u64::try_from(*value).ok(),
        Value::Int64(value) | Value::Sint64(value) => u64::try_from(*value).ok(),
        Value::Uint32(value) => Some(u64::from(*value)),
        Value::Uint64(value) => Some(*value),
        Value::Bool(value) => Some(u64::from(*value)),
        Value::Double(_) | Value::Float(_) | Value::Text(_) => None,
    }
}

fn find_text<'a>(attributes: &'a [Attribute], name: &str) -> Option<&'a str> {
    let attribute = attributes.iter().find(|attribute| attribute.name == name)?;
    match attribute.value.as_ref()? {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use comm_core::Algorithm;

    use super::*;

    /// Three ranks: computation, an all-reduce on a lane, a message, an all-gather of two of them.
    fn example() -> Trace {
        let all = Collective {
            kind: OpKind::AllReduce,
            dtype: DType::Bf16,
            count: 1001,
            root: 0,
            algorithm: Some(Algorithm::Sharded),
            group: Vec::new(),
            lane: 3,
            background: true,
        };
        let of = |rank: usize| {
            let mut nodes = RankTrace::default();
            let forward = nodes.push("forward", vec![], Work::Compute { ns: 1_234_567 });
            let reduced = nodes.push("gradients", vec![forward], Work::Collective(all.clone()));
            match rank {
                0 => {
                    nodes.push(
                        "parameters",
                        vec![reduced],
                        Work::Send(Message { peer: 2, bytes: 77, lane: 1, background: false }),
                    );
                }
                2 => {
                    nodes.push(
                        "parameters",
                        vec![reduced],
                        Work::Receive(Message { peer: 0, bytes: 77, lane: 1, background: true }),
                    );
                }
                _ => {}
            }
            if rank != 1 {
                let gather = Collective {
                    kind: OpKind::AllGather,
                    dtype: DType::F32,
                    count: 9,
                    algorithm: None,
                    group: vec![0, 2],
                    ..all.clone()
                };
                nodes.push("gather", vec![forward, reduced], Work::Collective(gather));
            }
            nodes.nodes[1].recorded = Some(Recorded { began_ns: 1_300_001, took_ns: 999 });
            nodes
        };
        Trace { name: "an example".into(), steps: 4, ranks: (0..3).map(of).collect() }
    }

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        write(&example(), folder.path(), "step").unwrap();
        assert_eq!(read(folder.path()).unwrap(), example());
        assert_eq!(read(&folder.path().join("step")).unwrap(), example());
    }

    /// What another program writes: other types of attributes, no nanoseconds, nodes in any order, numbers of nodes with gaps.
    #[test]
    fn a_foreign_trace_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let all_gather = |id: u64, after: Vec<u64>| ChakraNode {
            id,
            name: "ncclKernel_AllGather".into(),
            kind: COLL,
            ctrl_deps: after,
            attr: vec![
                Attribute { name: "comm_type".into(), value: Some(Value::Int64(2)) },
                Attribute { name: "comm_size".into(), value: Some(Value::Int64(1000)) },
                text("pg_name", "default_pg"),
                Attribute { name: "unheard_of".into(), value: None },
            ],
            ..ChakraNode::default()
        };
        for rank in 0..2 {
            let nodes = [
                all_gather(90, vec![7]),
                ChakraNode { id: 7, kind: COMP, duration_micros: 250, ..ChakraNode::default() },
            ];
            let mut bytes = GlobalMetadata { version: "0.0.4".into(), attr: vec![] }.encode_length_delimited_to_vec();
            bytes.extend(nodes.iter().flat_map(prost::Message::encode_length_delimited_to_vec));
            std::fs::write(folder.path().join(format!("llama.{rank}.et")), bytes).unwrap();
        }
        let trace = read(folder.path()).unwrap();
        assert_eq!((trace.ranks.len(), trace.steps), (2, 1));
        let nodes = &trace.ranks[1].nodes;
        assert_eq!(nodes[0].work, Work::Compute { ns: 250_000 });
        // A shard of 1000 bytes on each of two ranks, who are all ranks.
        let Work::Collective(gather) = &nodes[1].work else { panic!("{nodes:?}") };
        assert_eq!((gather.kind, gather.bytes(), &nodes[1].after), (OpKind::AllGather, 2000, &vec![0]));
        assert!(gather.group.is_empty());
    }

    #[test]
    fn a_bad_file_is_refused_with_one_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("bad.0.et");
        let of = |nodes: &[ChakraNode]| {
            let mut bytes = GlobalMetadata::default().encode_length_delimited_to_vec();
            bytes.extend(nodes.iter().flat_map(prost::Message::encode_length_delimited_to_vec));
            bytes
        };
        let node = |id, after| ChakraNode { id, kind: COMP, data_deps: after, ..ChakraNode::default() };
        let collective = |attr: Vec<Attribute>| {
            let attr = [vec![signed("comm_type", 0)], attr].concat();
            ChakraNode { id: 1, kind: COLL, attr, ..ChakraNode::default() }
        };
        let whole = encode(&example(), 0, &example().ranks[0], &[]);
        let cases: Vec<(Vec<u8>, &str)> = vec![
            (vec![], "it is empty"),
            (whole[..whole.len() - 3].to_vec(), "the file is cut off"),
            (b"\x1f\x8b\x08".to_vec(), "gunzip"),
            (b"{\"nodes\": []}".to_vec(), "not a Chakra trace"),
            (of(&[node(1, vec![2]), node(2, vec![1])]), "wait for each other"),
            (of(&[node(1, vec![5])]), "waits for node 5, which is not there"),
            (of(&[node(1, vec![]), node(1, vec![])]), "two nodes 1"),
            (of(&[ChakraNode { id: 1, kind: 99, ..ChakraNode::default() }]), "unknown type of node 99"),
            (of(&[ChakraNode { id: 1, kind: COLL, ..ChakraNode::default() }]), "no attribute comm_type"),
            (
                of(&[ChakraNode { id: 1, kind: COLL, attr: vec![signed("comm_type", 55)], ..ChakraNode::default() }]),
                "unknown collective 55",
            ),
            (
                of(&[ChakraNode {
                    id: 1,
                    kind: SEND,
                    attr: vec![signed("comm_size", 1), signed("comm_dst", 8)],
                    ..ChakraNode::default()
                }]),
                "rank 8, and there are 1 ranks",
            ),
            (of(&[node(1, vec![1])]), "wait for each other"),
            (of(&[node(1, vec![3]), node(2, vec![1]), node(3, vec![2])]), "wait for each other"),
            (of(&[ChakraNode { duration_micros: u64::MAX, ..node(1, vec![]) }]), "a duration is too long"),
            (
                of(&[collective(vec![signed("comm_size", i64::MAX)])]),
                "elements, and at most 1099511627776 are possible",
            ),
            (
                of(&[collective(vec![signed("comm_size", 4), unsigned("isocomm.count", u64::MAX)])]),
                "elements, and at most 1099511627776 are possible",
            ),
            (of(&[collective(vec![signed("comm_size", -4)])]), "no attribute comm_size"),
            (
                of(&[collective(vec![signed("comm_size", 4), unsigned("isocomm.lane", 1 << 40)])]),
                "its lane is 1099511627776",
            ),
            (of(&[collective(vec![signed("comm_size", 4), unsigned("isocomm.root", 7)])]), "its root is 7"),
            (of(&[collective(vec![signed("comm_size", 4), text("isocomm.dtype", "f\n32")])]), "f 32"),
            // A length of 2^63, and a byte that begins no length.
            ([&of(&[])[..], &[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01]].concat(), "a node"),
            ([&of(&[])[..], &[0xff; 16]].concat(), "a node"),
        ];
        for (bytes, expected) in cases {
            std::fs::write(&file, bytes).unwrap();
            let why = read(folder.path()).unwrap_err().to_string();
            assert!(why.contains(expected) && why.lines().count() == 1, "expected {expected:?}: {why}");
            assert!(why.contains(&folder.path().display().to_string()), "{why}");
        }
    }

    #[test]
    fn any_bytes_are_refused_or_read_and_no_byte_is_needed_twice() {
        let whole = encode(&example(), 2, &example().ranks[2], &example().groups());
        for (index, _) in whole.iter().enumerate() {
            let _ = decode(&whole[..index]).and_then(sorted);
            for other in [0x00, 0x7f, 0xff] {
                let mut changed = whole.clone();
                changed[index] = other;
                let _ = decode(&changed).and_then(sorted);
            }
        }
    }

    #[test]
    fn which_files_are_meant_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let why = read(folder.path()).unwrap_err().to_string();
        assert!(why.contains("no files of a Chakra trace, PREFIX.RANK.et"), "{why}");
        write(&example(), folder.path(), "one").unwrap();
        std::fs::remove_file(folder.path().join("one.1.et")).unwrap();
        let why = read(folder.path()).unwrap_err().to_string();
        assert!(why.contains("the file of rank 1 is missing"), "{why}");
        write(&example(), folder.path(), "two").unwrap();
        let why = read(folder.path()).unwrap_err().to_string();
        assert!(why.contains("name one of one, two"), "{why}");
        assert_eq!(read(&folder.path().join("two")).unwrap(), example());
    }
}
