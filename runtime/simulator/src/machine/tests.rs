use super::{Machine, MachineKind};
use crate::Error;

fn node() -> Machine {
    Machine::bundled("a100-node").expect("it is bundled")
}

/// The problem of a machine file, as people read it.
fn refusal(text: &str) -> String {
    Machine::from_toml(text).expect_err("it is refused").to_string()
}

/// The file of `a100-node` with another text in place of `old`.
fn edited(old: &str, new: &str) -> String {
    let text = node().to_toml();
    assert_eq!(text.matches(old).count(), 1, "{old} in {text}");
    text.replace(old, new)
}

#[test]
fn bundled_machines_go_by_the_names_in_their_files() {
    for name in Machine::BUNDLED {
        let machine = Machine::bundled(name).expect("it is read");
        assert_eq!(machine.name, name);
        assert!(machine.numbers().iter().all(|number| !number.source.is_empty()));
    }
    let unknown = Machine::bundled("a100").expect_err("there is none");
    assert_eq!(
        unknown.to_string(),
        "no bundled machine is called \"a100\": expected a100-node, a100-cluster, h100-cluster, two-core-cpu"
    );
}

#[test]
fn files_that_are_written_are_read_as_the_same_machine() {
    for name in Machine::BUNDLED {
        let machine = Machine::bundled(name).expect("it is read");
        assert_eq!(Machine::from_toml(&machine.to_toml()), Ok(machine));
    }
    let mut named = node();
    named.name = "\"quoted\"\nand \\ more".into();
    assert_eq!(Machine::from_toml(&named.to_toml()), Ok(named));
}

#[test]
fn numbers_have_the_units_of_datasheets() {
    let node = node();
    let device = node.device().expect("it has cards");
    assert_eq!(node.cards(), 8);
    assert_eq!(node.compute.bf16.value(), 312e12);
    assert_eq!(device.links.machine.latency.value(), 3.4e-6);
    assert_eq!(device.links.network, None);
    let cluster = Machine::bundled("a100-cluster").expect("it is bundled");
    let network = cluster.device().and_then(|device| device.links.network.clone());
    assert_eq!(network.expect("machines are connected").bandwidth.value(), 200e9);
    let cpu = Machine::bundled("two-core-cpu").expect("it is bundled");
    assert!(matches!(cpu.kind, MachineKind::Host(_)));
}

#[test]
fn a_refusal_names_line_and_key() {
    let negative = edited("\"300 GB/s\"", "\"-300 GB/s\"");
    let line = 1 + negative.lines().position(|line| line.contains("-300")).expect("it is there");
    assert_eq!(
        refusal(&negative),
        format!(
            "machine file, line {line}, links.machine.bandwidth: \"-300 GB/s\" is not between 1 kB/s and 1 EB/s"
        )
    );
    let unknown = refusal(&edited("efficiency = { value = \"0.729\"", "speed = { value = \"0.9\""));
    assert!(
        unknown.starts_with("machine file, line 8, memory.speed: unknown field `speed`"),
        "{unknown}"
    );
    let missing = node().to_toml().replace("latency = ", "# latency = ");
    assert!(
        refusal(&missing).ends_with("links.machine: missing field `latency`"),
        "{}",
        refusal(&missing)
    );
    let syntax = refusal("name = \"x\"\nkind = ");
    assert!(syntax.starts_with("machine file, line 2: "), "{syntax}");
}

#[test]
fn a_refusal_is_one_line() {
    let text = node().to_toml();
    let cut = (0..text.trim_end().len()).step_by(7).map(|end| text[..end].to_owned());
    let odd = ["", "\n\n=", "name = '''\n\n'''", "[[ranks]]", "ranks = 8", "kind = \"gpu\"\n"];
    for text in cut.chain(odd.map(str::to_owned)) {
        let problem = refusal(&text);
        assert_eq!(problem.lines().count(), 1, "{problem:?}");
    }
    let broken = edited("\"0.729\"", "\"0.729\\n0.8\"");
    assert_eq!(refusal(&broken).lines().count(), 1);
}

#[test]
fn every_number_is_needed_with_its_source() {
    let text = node().to_toml();
    for number in node().numbers() {
        let key = number.name.rsplit('.').next().unwrap_or(&number.name).to_owned();
        let line =
            |line: &&str| line.starts_with(&format!("{key} = ")) && line.contains(&number.source);
        let line = text.lines().find(line).expect("the number has a line");
        assert!(
            Machine::from_toml(&text.replacen(line, "", 1)).is_err(),
            "without {}",
            number.name
        );
        let bare =
            line.split(", source").next().map(|start| format!("{start} }}")).expect("a start");
        let problem = refusal(&text.replacen(line, &bare, 1));
        assert!(problem.ends_with("missing field `source`"), "{problem}");
    }
}

#[test]
fn tables_belong_to_a_kind() {
    let host = Machine::bundled("two-core-cpu").expect("it is bundled").to_toml();
    assert_eq!(
        refusal(&host.replace("\"host\"", "\"device\"")),
        "machine file, kind: a device has the tables host and links, and no threads"
    );
    assert_eq!(
        refusal(&node().to_toml().replace("\"device\"", "\"host\"")),
        "machine file, kind: a host has the table threads, and neither host nor links"
    );
}

#[test]
fn a_fit_sets_numbers_by_name() {
    let mut machine = node();
    machine.set("links.machine.efficiency", 0.5, "fitted to a.csv").expect("it is possible");
    let efficiency = &machine.device().expect("it has cards").links.machine.efficiency;
    assert_eq!(efficiency.value(), 0.5);
    let numbers = machine.numbers().into_iter().zip(node().numbers());
    let changed = numbers.filter(|(new, old)| new.value != old.value).map(|(new, _)| new);
    let names: Vec<_> = changed.map(|new| (new.name, new.source)).collect();
    assert_eq!(names, [("links.machine.efficiency".into(), "fitted to a.csv".into())]);
}

#[test]
fn a_fit_cannot_set_what_is_impossible() {
    let mut machine = node();
    let mut refuse = |name: &str, value, source| {
        let refused = machine.set(name, value, source).expect_err("it is impossible");
        assert!(matches!(refused, Error::MachineNumber { .. }));
        refused.to_string()
    };
    assert_eq!(
        refuse("memory.efficiency", 1.5, "a fit"),
        "memory.efficiency: 1.5 is not between 0.000001 and 1"
    );
    assert_eq!(refuse("memory.efficiency", 0.5, ""), "memory.efficiency: needs a source");
    assert_eq!(
        refuse("threads.switch", 0.5, "a fit"),
        "threads.switch: is no number of this machine"
    );
    for value in [f64::NAN, f64::INFINITY, -1.0] {
        refuse("calls.start", value, "a fit");
    }
    assert_eq!(refuse("ranks", 2.5, "a fit"), "ranks: 2.5 is no whole number");
    assert_eq!(machine, node());
}

#[test]
fn a_number_has_the_range_of_its_unit() {
    let numbers = node().numbers();
    let latency =
        numbers.iter().find(|it| it.name == "links.machine.latency").expect("it is there");
    assert_eq!((latency.value, latency.unit.name), (3.4e-6, "s"));
    assert_eq!((latency.unit.least, latency.unit.most), (0.0, 1.0));
}
