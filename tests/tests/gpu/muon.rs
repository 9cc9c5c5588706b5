//! The element-wise parts of the Muon update.

use hsdp_kernels::cuda::{DeviceUpdate, PartOfMatrix};
use hsdp_kernels::{
    FusedUpdate, HostBuffer, MomentumKind, MuonStep, Values, muon, muon_direction, update_in_blocks,
};
use hsdp_sharding::DType;

use super::numbers::ordinary;
use super::{assert_same, download, stream, upload};

/// Parts that start anywhere, short and long, whose elements have other places in the buffers of
/// state and direction.
const PARTS: [PartOfMatrix; 5] = [
    PartOfMatrix { len: 1, shard: 3, state: 0, direction: 5000 },
    PartOfMatrix { len: 8, shard: 4, state: 2, direction: 4980 },
    PartOfMatrix { len: 2501, shard: 16, state: 13, direction: 1 },
    PartOfMatrix { len: 0, shard: 2517, state: 2514, direction: 0 },
    PartOfMatrix { len: 1024, shard: 2600, state: 2600, direction: 2600 },
];

const LEN: usize = 5003;

const DIVISOR: f64 = 96.0;

fn steps() -> impl Iterator<Item = MuonStep> {
    [MomentumKind::Classic, MomentumKind::Nesterov].into_iter().map(|kind| MuonStep {
        rate: 0.02,
        decay: 1e-3,
        momentum: 0.95,
        kind,
        clip: 0.37,
    })
}

/// The gradient of a part, divided.
fn divided(gradient: &[f32], part: &PartOfMatrix) -> Vec<f32> {
    let mut parameters = vec![0.0; part.len];
    let mut quotients = Vec::new();
    let gradient = &gradient[part.shard..part.shard + part.len];
    let fused =
        FusedUpdate { parameters: &mut parameters, rounded: None, gradient, divisor: DIVISOR };
    update_in_blocks(fused, |_, _, block| quotients.extend_from_slice(block));
    quotients
}

#[test]
#[ignore = "needs a CUDA device"]
fn directions_are_those_of_the_twin() {
    for step in steps() {
        let stream = stream();
        let [gradient, momentum, mut expected] = [1, 2, 3].map(|seed| ordinary(seed, LEN));
        let up = |values: &[f32]| upload(&stream, Values::F32(values));
        let from = up(&gradient);
        let state = up(&momentum);
        let mut direction = up(&expected);
        for part in &PARTS {
            let issued = stream.muon_direction(&mut direction, &from, DIVISOR, part, &step, &state);
            issued.expect("computed");
            let own = &mut expected[part.direction..part.direction + part.len];
            own.copy_from_slice(&divided(&gradient, part));
            muon_direction(&step, own, &momentum[part.state..part.state + part.len]);
        }
        let found = download(&stream, &direction);
        assert_same(found.values(), Values::F32(&expected), &format!("{:?}", step.kind));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn updates_are_those_of_the_twin() {
    for (step, cast) in steps()
        .flat_map(|step| [None, Some(DType::F16), Some(DType::BF16)].map(|cast| (step, cast)))
    {
        let stream = stream();
        let [mut parameters, gradient, direction, mut momentum] =
            [1, 2, 3, 4].map(|seed| ordinary(seed, LEN));
        let mut rounded = cast.map(|dtype| HostBuffer::zeros(dtype, LEN).expect("memory"));
        let up = |values: &[f32]| upload(&stream, Values::F32(values));
        let mut on_device = (up(&parameters), up(&momentum));
        let from = up(&gradient);
        let along = up(&direction);
        let mut copy = rounded.as_ref().map(|it| upload(&stream, it.values()));
        for part in &PARTS {
            let update = DeviceUpdate {
                parameters: &mut on_device.0,
                first: 0,
                gradient_first: 0,
                rounded: copy.as_mut(),
                gradient: &from,
                divisor: DIVISOR,
            };
            stream.muon(update, part, &step, &along, &mut on_device.1).expect("updated");
            let own = part.shard..part.shard + part.len;
            let fused = FusedUpdate {
                parameters: &mut parameters[own.clone()],
                rounded: rounded.as_mut().map(|it| it.values_mut().slice(own.clone())),
                gradient: &gradient[own],
                divisor: DIVISOR,
            };
            let direction = &direction[part.direction..part.direction + part.len];
            let momentum = &mut momentum[part.state..part.state + part.len];
            update_in_blocks(fused, |block, parameters, gradient| {
                let along = &direction[block.clone()];
                muon(&step, parameters, [gradient, along], &mut momentum[block]);
            });
        }
        let what = |name: &str| format!("{name}, {:?}, cast to {cast:?}", step.kind);
        let same = |found: &_, expected: Values<'_>, name: &str| {
            assert_same(download(&stream, found).values(), expected, &what(name));
        };
        same(&on_device.0, Values::F32(&parameters), "parameters");
        same(&on_device.1, Values::F32(&momentum), "momentum");
        if let (Some(found), Some(expected)) = (&copy, &rounded) {
            same(found, expected.values(), "rounded parameters");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn parts_that_do_not_fit_are_refused() {
    let stream = stream();
    let step = steps().next().expect("a step");
    let mut buffers = [0; 4].map(|_| upload(&stream, Values::F32(&[1.0; 16])));
    let [parameters, gradient, direction, momentum] = &mut buffers;
    for (shard, state, place) in [(9, 0, 0), (0, 9, 0), (0, 0, usize::MAX)] {
        let part = PartOfMatrix { len: 8, shard, state, direction: place };
        let update = DeviceUpdate {
            parameters,
            first: 0,
            rounded: None,
            gradient,
            gradient_first: 0,
            divisor: 1.0,
        };
        let refused = stream.muon(update, &part, &step, direction, momentum);
        let said = format!("{part:?} does not lie in a buffer of 16 elements");
        let of_update = match shard {
            0 => format!("muon: {said}"),
            _ => format!("muon: {part:?} does not lie within elements 0..16"),
        };
        assert_eq!(refused.expect_err("it does not fit").to_string(), of_update);
        let refused = stream.muon_direction(direction, gradient, 1.0, &part, &step, momentum);
        let told = refused.expect_err("it does not fit").to_string();
        assert_eq!(told, format!("muon_direction: {said}"));
    }
}
