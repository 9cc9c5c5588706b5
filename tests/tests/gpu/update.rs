//! Updates of parameters.

use hsdp_kernels::cuda::{DeviceBuffer, DeviceUpdate, PieceOfStep};
use hsdp_kernels::{
    AdamWStep, FusedUpdate, HostBuffer, LionStep, MomentumKind, SgdStep, Values, adamw, lion, sgd,
    update_in_blocks,
};
use hsdp_sharding::DType;

use super::numbers::ordinary;
use super::{assert_same, device, download, stream, upload};

/// More pieces than one launch takes, with gaps between them, and between their states, that no
/// update may touch; and the numbers of elements and of states.
fn pieces() -> (Vec<PieceOfStep>, [usize; 2]) {
    let mut start = 8;
    let mut state = 4;
    let mut pieces = Vec::new();
    for index in 0..125_usize {
        let len = [1, 7, 8, 9, 40, 3000][index % 6];
        pieces.push(PieceOfStep { range: start..start + len, state, step: 1 + index as u64 % 3 });
        start += (len + index % 5).next_multiple_of(8);
        state += (len + index % 3).next_multiple_of(4);
    }
    (pieces, [start + 3, state + 5])
}

/// The dtypes in which the result may be wanted, too.
const CASTS: [Option<DType>; 3] = [None, Some(DType::F16), Some(DType::BF16)];

/// State of an update on the host.
struct Host {
    parameters: Vec<f32>,
    rounded: Option<HostBuffer>,
    gradient: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Host {
    fn new([len, states]: [usize; 2], cast: Option<DType>) -> Self {
        let rounded = cast.map(|dtype| HostBuffer::zeros(dtype, len).expect("memory"));
        let [parameters, gradient] = [1, 2].map(|seed| ordinary(seed, len));
        let first = ordinary(3, states);
        let second = ordinary(4, states).into_iter().map(f32::abs).collect();
        Self { parameters, rounded, gradient, first, second }
    }

    /// Updates a piece by the twin.
    fn update(
        &mut self,
        piece: &PieceOfStep,
        divisor: f64,
        act: impl Fn(&mut [f32], &[f32], &mut [f32], &mut [f32]),
    ) {
        let range = piece.range.clone();
        let rounded = self.rounded.as_mut().map(|it| it.values_mut().slice(range.clone()));
        let parameters = &mut self.parameters[range.clone()];
        let fused =
            FusedUpdate { parameters, rounded, gradient: &self.gradient[range.clone()], divisor };
        let own = piece.state..piece.state + range.len();
        let first = &mut self.first[own.clone()];
        let second = &mut self.second[own];
        update_in_blocks(fused, |block, parameters, gradient| {
            act(parameters, gradient, &mut first[block.clone()], &mut second[block]);
        });
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn adamw_updates_as_the_twin_does() {
    let (pieces, len) = pieces();
    let step = AdamWStep {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 1,
        clip: 0.37,
    };
    for (cast, divisor) in
        CASTS.into_iter().flat_map(|cast| [(cast, 1.0), (cast, 96.0), (cast, 64.0)])
    {
        compare(
            &pieces,
            len,
            cast,
            divisor,
            |device, update| {
                let updated = stream().adamw(update, &pieces, &step, &mut device.0, &mut device.1);
                updated.expect("updated");
            },
            |piece, parameters, gradient, first, second| {
                adamw(&AdamWStep { step: piece.step, ..step }, parameters, gradient, first, second);
            },
        );
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn sgd_updates_as_the_twin_does() {
    let (pieces, len) = pieces();
    for kind in [None, Some(MomentumKind::Classic), Some(MomentumKind::Nesterov)] {
        let momentum = if kind.is_some() { 0.9 } else { 0.0 };
        let step = SgdStep {
            learning_rate: 1e-2,
            momentum,
            kind: kind.unwrap_or_default(),
            weight_decay: 0.1,
            clip: 0.37,
        };
        for cast in CASTS {
            compare(
                &pieces,
                len,
                cast,
                96.0,
                |device, update| {
                    let velocity = kind.map(|_| &mut device.0);
                    stream().sgd(update, &pieces, &step, velocity).expect("updated");
                },
                |_, parameters, gradient, first, _| {
                    sgd(&step, parameters, gradient, kind.map(|_| first));
                },
            );
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn lion_updates_as_the_twin_does() {
    let (pieces, len) = pieces();
    let beta1 = 0.9;
    let beta2 = 0.99;
    let step = LionStep { learning_rate: 1e-2, beta1, beta2, weight_decay: 0.1, clip: 0.37 };
    for cast in CASTS {
        compare(
            &pieces,
            len,
            cast,
            96.0,
            |device, update| {
                stream().lion(update, &pieces, &step, &mut device.0).expect("updated");
            },
            |_, parameters, gradient, first, _| lion(&step, parameters, gradient, first),
        );
    }
}

/// Updates on the device and by the twin, and compares all that either writes.
fn compare(
    pieces: &[PieceOfStep],
    len: [usize; 2],
    cast: Option<DType>,
    divisor: f64,
    on_device: impl Fn(&mut (DeviceBuffer, DeviceBuffer), DeviceUpdate<'_>),
    twin: impl Fn(&PieceOfStep, &mut [f32], &[f32], &mut [f32], &mut [f32]),
) {
    let stream = stream();
    let mut host = Host::new(len, cast);
    let up = |values: &[f32]| upload(&stream, Values::F32(values));
    let mut rounded = host.rounded.as_ref().map(|it| upload(&stream, it.values()));
    let mut parameters = up(&host.parameters);
    let gradient = up(&host.gradient);
    let mut state = (up(&host.first), up(&host.second));
    let update = DeviceUpdate {
        parameters: &mut parameters,
        first: 0,
        gradient_first: 0,
        rounded: rounded.as_mut(),
        gradient: &gradient,
        divisor,
    };
    on_device(&mut state, update);
    for piece in pieces {
        host.update(piece, divisor, |parameters, gradient, first, second| {
            twin(piece, parameters, gradient, first, second);
        });
    }
    let compare = |found: &DeviceBuffer, expected: Values<'_>, what: &str| {
        let what = format!("{what}, cast to {cast:?}, / {divisor}");
        assert_same(download(&stream, found).values(), expected, &what);
    };
    compare(&parameters, Values::F32(&host.parameters), "parameters");
    compare(&state.0, Values::F32(&host.first), "first state");
    compare(&state.1, Values::F32(&host.second), "second state");
    if let (Some(found), Some(expected)) = (&rounded, &host.rounded) {
        compare(found, expected.values(), "rounded parameters");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn pieces_that_do_not_fit_are_refused() {
    let stream = stream();
    let mut buffers = [0; 4].map(|_| upload(&stream, Values::F32(&[1.0; 64])));
    let [parameters, gradient, first, second] = &mut buffers;
    let step = AdamWStep {
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.9,
        epsilon: 1e-8,
        weight_decay: 0.0,
        step: 1,
        clip: 1.0,
    };
    let places = [(60..70, 1, [0, 0]), (6..8, 1, [0, 0]), (8..16, 0, [0, 0])];
    let places = places.into_iter().chain([(4..12, 1, [8, 0]), (68..76, 1, [8, 16])]);
    for (range, number, [first_parameter, gradient_first]) in places {
        let update = DeviceUpdate {
            parameters,
            first: first_parameter,
            rounded: None,
            gradient,
            gradient_first,
            divisor: 1.0,
        };
        let begin = first_parameter.max(gradient_first);
        let end = 64 + first_parameter.min(gradient_first);
        let piece = PieceOfStep { range: range.clone(), state: 0, step: number };
        let refused = stream.adamw(update, &[piece], &step, first, second);
        let said = format!(
            "adamw: piece {range:?} of update {number} is invalid: it must start at a multiple of 4 \
             from {begin} on, lie within elements {begin}..{end}, and updates count from 1"
        );
        assert_eq!(refused.expect_err("it does not fit").to_string(), said);
    }
    for (states, number, from) in [([60, 0], 0, 0), ([6, 24], 0, 0), ([8, 12], 1, 16)] {
        let piece = |range, state| PieceOfStep { range, state, step: 1 };
        let pieces = [piece(0..8, states[0]), piece(8..16, states[1])];
        let update = DeviceUpdate {
            parameters,
            first: 0,
            rounded: None,
            gradient,
            gradient_first: 0,
            divisor: 1.0,
        };
        let refused = stream.adamw(update, &pieces, &step, first, second);
        let range = &pieces[number].range;
        let state = states[number];
        let said = format!(
            "adamw: the state of piece {range:?} is invalid: it starts at element {state}, but must start at a \
             multiple of 4 from {from} on, and its 8 elements must lie within 64"
        );
        assert_eq!(refused.expect_err("it does not fit").to_string(), said);
    }
    let last = usize::MAX - 3;
    for [first_parameter, gradient_first] in [[last, 0], [0, last]] {
        let update = DeviceUpdate {
            parameters,
            first: first_parameter,
            rounded: None,
            gradient,
            gradient_first,
            divisor: 1.0,
        };
        let refused = stream.adamw(update, &[], &step, first, second);
        let said = format!("adamw: a buffer of 64 elements cannot begin with element {last}");
        assert_eq!(refused.expect_err("no shard has it").to_string(), said);
    }
    assert_eq!(DeviceBuffer::new(&device(), DType::F32, 0, "a test").map(|it| it.len()), Ok(0));
}
