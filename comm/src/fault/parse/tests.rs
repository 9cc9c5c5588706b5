use super::*;

#[test]
fn what_is_shown_is_read() {
    let places = [
        FaultPlace::Unit(UnitId::new(3)),
        FaultPlace::UnitStage(UnitId::new(0), Stage::AllReduce),
        FaultPlace::Stage(Stage::Header),
        FaultPlace::Call(17),
    ];
    let kinds = FaultKind::PLAIN.into_iter().map(|(kind, _)| kind).chain([
        FaultKind::Delay(Duration::from_millis(300)),
        FaultKind::Delay(Duration::from_micros(585)),
        FaultKind::NonFinite(f32::NEG_INFINITY),
    ]);
    for kind in kinds {
        for place in places {
            let fault = Fault::at(Rank::new(2), 40, place, kind);
            assert_eq!(fault.to_string().parse(), Ok(fault));
        }
    }
}

#[test]
fn the_largest_numbers_are_read() {
    let text = "rank 4294967295, step 18446744073709551615, unit 4294967295: panic";
    assert_eq!(text.parse::<Fault>().expect("a fault").to_string(), text);
    // Finite in f32, but not in f16.
    let text = "rank 0, step 0, call 18446744073709551615: a gradient of 65520";
    assert_eq!(text.parse::<Fault>().expect("a fault").to_string(), text);
}

#[test]
fn what_is_no_fault_is_refused_with_what_is_missing() {
    let refused = [
        ("panic", "there is no `: KIND`"),
        ("step 3: panic", "it must begin with `rank N`"),
        ("rank 1, call 3: panic", "`step N` must follow the rank"),
        ("rank 1, step 2: panic", "the place must be"),
        ("rank 1, step 2, unit x: panic", "the place must be"),
        ("rank 1, step 2, unit 0: explode", "the kind must be one of panic, error"),
        ("rank 1, step 2, unit 0: delay of 3 parsecs", "the kind must be one of"),
        ("rank 4294967296, step 2, unit 0: panic", "N below 2^32"),
        ("rank -1, step 2, unit 0: panic", "N below 2^32"),
        ("rank 1, step 18446744073709551616, unit 0: panic", "N below 2^64"),
        ("rank 1, step 2, unit 4294967296: panic", "the place must be"),
        ("rank 1, step 2, call 18446744073709551616: panic", "the place must be"),
        ("rank 1, step 2, unit 0: a gradient of 5", "5 is finite in every dtype"),
        ("rank 1, step 2, unit 0: a gradient of -65504", "-65504 is finite in every dtype"),
    ];
    for (text, problem) in refused {
        let message = text.parse::<Fault>().expect_err("it is none").to_string();
        assert!(message.contains(problem) && message.contains(text), "{message}");
    }
}
