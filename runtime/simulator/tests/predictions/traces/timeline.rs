//! Timelines.

use std::collections::{BTreeMap, BTreeSet};

use hsdp_sharding::StateOver;
use hsdp_sharding::step::Sequences;
use hsdp_simulator::{Lane, ModelPlacement, Share, Timing, What, trace};
use serde_json::Value;

use super::case::{CASE, Case, Given, Prepared};

fn timeline(case: Case) -> (Timing, Value) {
    let prepared = case.prepare();
    let (timing, spans) = trace(&prepared.order, &prepared.costs).expect("it ends");
    let mut json = Vec::new();
    prepared.traces().write_timeline(&timing, &spans, &mut json).expect("memory has room");
    (timing, serde_json::from_slice(&json).expect("JSON"))
}

fn events<'a>(json: &'a Value, ph: &'a str) -> impl Iterator<Item = &'a Value> {
    json["traceEvents"].as_array().expect("a list").iter().filter(move |it| it["ph"] == ph)
}

/// The names of processes or threads, by number.
fn named(json: &Value, what: &str) -> BTreeMap<(u64, u64), String> {
    let found = events(json, "M").filter(|event| event["name"] == what);
    found.map(|it| (place(it), it["args"]["name"].as_str().expect("a name").to_owned())).collect()
}

fn place(event: &Value) -> (u64, u64) {
    (event["pid"].as_u64().expect("a number"), event["tid"].as_u64().expect("a number"))
}

/// As Perfetto reads times: in nanoseconds, rounded.
fn nanoseconds(time: &Value) -> u64 {
    let nanoseconds = time.as_f64().expect("a number") * 1000.0;
    format!("{nanoseconds:.0}").parse().expect("it is not negative")
}

/// A complete event, in nanoseconds.
#[derive(Clone, Debug)]
struct Slice {
    name: String,
    begins: u64,
    ends: u64,
}

impl Slice {
    fn duration(&self) -> u64 {
        self.ends - self.begins
    }
}

/// The slices of each thread, in order.
fn threads(json: &Value) -> BTreeMap<(u64, u64), Vec<Slice>> {
    let mut threads: BTreeMap<_, Vec<Slice>> = BTreeMap::new();
    for event in events(json, "X") {
        let begins = nanoseconds(&event["ts"]);
        let name = event["name"].as_str().expect("a name").to_owned();
        let slice = Slice { name, begins, ends: begins + nanoseconds(&event["dur"]) };
        threads.entry(place(event)).or_default().push(slice);
    }
    threads.values_mut().for_each(|slices| slices.sort_by_key(|it| (it.begins, it.ends)));
    threads
}

#[test]
fn processes_are_colors_and_threads_are_lanes() {
    let (_, json) = timeline(Case { mesh: [2, 3], ..CASE });
    assert_eq!(json["displayTimeUnit"], "ms");
    let expected = [((1, 0), "rank 0 and 2 like it"), ((2, 0), "rank 3 and 2 like it")];
    assert_eq!(
        named(&json, "process_name"),
        expected.map(|(at, name)| (at, name.to_owned())).into()
    );
    let of_threads = |placement| {
        let (_, json) = timeline(Case { placement, batch_norms: 1, ..CASE });
        let names = named(&json, "thread_name");
        assert_eq!(names.keys().collect::<Vec<_>>(), threads(&json).keys().collect::<Vec<_>>());
        names
            .into_iter()
            .filter(|((pid, _), _)| *pid == 1)
            .map(|(_, name)| name)
            .collect::<Vec<_>>()
    };
    let device = ["host", "computation", "exchanges", "collectives", "statistics"];
    assert_eq!(of_threads(ModelPlacement::Device), device);
    let host = ["host", "exchanges", "gathers", "reductions", "all-reduces", "statistics"];
    assert_eq!(of_threads(ModelPlacement::Host), host);
}

/// A timeline and the schedules of its order put the same channels into one stream.
#[test]
fn lanes_are_the_streams_of_schedules() {
    for (placement, sequences, streams) in [
        (ModelPlacement::Host, Sequences::OfEachChannel, 5),
        (ModelPlacement::Device, Sequences::One, 3),
    ] {
        let Prepared { order, costs, .. } = Case { placement, batch_norms: 2, ..CASE }.prepare();
        let mut of_lanes = BTreeMap::<Lane, BTreeSet<String>>::new();
        for span in trace(&order, &costs).expect("it ends").1 {
            if let What::Operation(operation) = span.what {
                of_lanes.entry(span.lane).or_default().insert(operation.channel.to_string());
            }
        }
        let mut of_streams = BTreeMap::<u64, BTreeSet<String>>::new();
        let schedules = order.schedules(None, sequences).expect("few actions");
        let schedules = serde_json::to_value(&schedules).expect("JSON");
        for action in schedules["schedules"][0].as_array().expect("a list") {
            let Some(communicator) = action["comm"].as_str() else { continue };
            let channel = communicator.split(' ').next().expect("a word");
            let stream = action["stream"].as_u64().expect("a number");
            of_streams.entry(stream).or_default().insert(channel.to_owned());
        }
        let of_lanes: BTreeSet<_> = of_lanes.into_values().collect();
        assert_eq!(of_lanes, of_streams.into_values().collect(), "{placement:?}");
        assert_eq!(of_lanes.len(), streams, "{placement:?}");
    }
}

#[test]
fn spans_say_what_they_are() {
    let (_, json) = timeline(CASE);
    let find = |name: &str| events(&json, "X").find(|it| it["name"] == name).expect(name).clone();
    let forward = find("forward layers.0");
    assert_eq!(forward["cat"], "computation");
    assert_eq!(forward["dur"], 22.0);
    assert_eq!(forward["args"], serde_json::json!({ "microbatch": 0 }));
    assert_eq!(find("launch backward layers.\"1\"")["dur"], 2.0);
    // Units of 64 f32 over 2 shards.
    let reduce = find("reduce_scatter layers.0");
    assert_eq!((&reduce["cat"], &reduce["dur"]), (&"collective".into(), &14.0.into()));
    let args = serde_json::json!({ "microbatch": 0, "bytes": 256, "dtype": "f32", "members": 2, "late_us": 0.0 });
    assert_eq!(reduce["args"], args);
    assert_eq!(find("issue all_gather embed")["args"]["bytes"], 128);
    assert_eq!(find("wait for all_gather embed")["cat"], "wait");
    // Gathers of the second row take longer, so the first row waits for it in an all-reduce.
    let late = |event: &Value| event["args"]["late_us"].as_f64().expect("a number");
    let all_reduces = events(&json, "X").filter(|it| it["name"] == "all_reduce layers.\"1\"");
    let late: Vec<f64> = all_reduces.map(late).collect();
    assert!(late[0] > 0.0 && late[1] == 0.0, "{late:?}");
}

/// Of the computation of a rank, each share but the gaps in which a device waits for its host.
#[test]
fn spans_of_a_rank_add_up_to_its_shares() {
    let placements = [ModelPlacement::Host, ModelPlacement::Device];
    for (placement, state) in
        placements.into_iter().flat_map(|it| StateOver::ALL.map(|state| (it, state)))
    {
        let costs = Given { unit: 1_000, ..CASE.costs };
        let (timing, json) = timeline(Case { placement, costs, state, ..CASE });
        for (rank, color) in timing.ranks.iter().zip(1..) {
            let tid = if placement == ModelPlacement::Host { 1 } else { 2 };
            let slices = &threads(&json)[&(color, tid)];
            let all: u64 = slices.iter().map(Slice::duration).sum();
            let picoseconds = |share| rank.shares.of(share).picoseconds();
            assert_eq!(all * 1000, rank.step.picoseconds() - picoseconds(Share::Host));
            let is_work =
                |it: &&Slice| !it.name.starts_with("issue") && !it.name.starts_with("wait");
            let work: u64 = slices.iter().filter(is_work).map(Slice::duration).sum();
            assert_eq!(
                work * 1000,
                picoseconds(Share::Computation) + picoseconds(Share::Optimizer)
            );
        }
    }
}

/// Times that are no whole nanoseconds are rounded so that the end of a span is the begin of the
/// next.
#[test]
fn spans_of_a_thread_do_not_overlap() {
    for unit in [1, 7, 333, 1_001, 999_999, 123_456_789] {
        for placement in [ModelPlacement::Host, ModelPlacement::Device] {
            let costs = Given { unit, ..CASE.costs };
            let (_, json) = timeline(Case { placement, costs, ..CASE });
            for (thread, slices) in threads(&json) {
                let apart = slices.windows(2).all(|pair| pair[0].ends <= pair[1].begins);
                assert!(apart, "unit {unit}, thread {thread:?}: {slices:?}");
            }
        }
    }
}
