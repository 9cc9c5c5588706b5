//! The maps are compared with their published construction, codes with a search through all
//! numbers, and updates with the formula in f64.

use super::{EIGHT_BIT_BLOCK, EightBit, adamw_8bit, decode, encode};
use crate::optimizer::AdamWStep;
use crate::optimizer::dynamic_map::DynamicMap;
use crate::simd::tests::on_all_widths;
use crate::simd::vectorized;

/// The map of a moment: the first has numbers of both signs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    First,
    Second,
}

const MOMENTS: [Moment; 2] = [Moment::First, Moment::Second];

impl Moment {
    fn map(self) -> &'static DynamicMap {
        match self {
            Self::First => DynamicMap::signed(),
            Self::Second => DynamicMap::unsigned(),
        }
    }

    fn numbers(self) -> &'static [f32; 256] {
        &self.map().numbers
    }
}

/// Encodes the state of a moment, compiled as an update is.
fn encode_all(moment: Moment, values: &[f32], State(codes, scales): &mut State) {
    vectorized(
        #[inline(always)]
        || {
            let blocks = values.chunks(EIGHT_BIT_BLOCK).zip(scales);
            for ((values, scale), codes) in blocks.zip(codes.chunks_mut(EIGHT_BIT_BLOCK)) {
                encode(moment.map(), values, codes, scale);
            }
        },
    );
}

const STEP: AdamWStep = AdamWStep {
    learning_rate: 3e-3,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 1,
    clip: 0.5,
};

/// The map as it was published: of the i-th of seven powers of ten, the middles of 2^i equal parts
/// (twice as many without signs) of the numbers from a tenth of it to itself; 0; and 1. They are
/// sorted.
fn by_construction(moment: Moment) -> Vec<f64> {
    let mut numbers = vec![0.0, 1.0];
    for i in 0..7 {
        let parts = if moment == Moment::First { 1 << i } else { 2 << i };
        let bounds: Vec<f64> =
            (0..=parts).map(|at| 0.1 + 0.9 * f64::from(at) / f64::from(parts)).collect();
        for pair in bounds.windows(2) {
            let number = 10_f64.powi(i - 6) * (pair[0] + pair[1]) / 2.0;
            numbers.push(number);
            numbers.extend((moment == Moment::First).then_some(-number));
        }
    }
    numbers.sort_by(f64::total_cmp);
    numbers
}

/// The code of the number nearest to `value`, by a search through all; of two, the lower one.
fn nearest(moment: Moment, value: f64) -> u8 {
    let distance = |code: u8| (f64::from(moment.numbers()[usize::from(code)]) - value).abs();
    (0..=255).min_by(|one, other| distance(*one).total_cmp(&distance(*other))).expect("256 codes")
}

/// The largest difference of two neighbors. The signed map has no -1, so the way from there to its
/// least number counts twice.
fn largest_gap(moment: Moment) -> f32 {
    let numbers = moment.numbers();
    let gaps = numbers.windows(2).map(|pair| pair[1] - pair[0]);
    let below = if moment == Moment::First { 2.0 * (1.0 + numbers[0]) } else { 0.0 };
    gaps.fold(below, f32::max)
}

fn wave(len: usize, frequency: f32) -> Vec<f32> {
    let sizes = [1e-3, 0.01, 0.1, 1.0, 10.0];
    (0..len).map(|at| ((at as f32 + 0.5) * frequency).sin() * sizes[at % 5]).collect()
}

/// Codes and scales, which own their memory.
#[derive(Debug, Clone, PartialEq)]
struct State(Vec<u8>, Vec<f32>);

impl State {
    fn new(len: usize) -> Self {
        Self(vec![0; len], vec![0.0; len.div_ceil(EIGHT_BIT_BLOCK)])
    }

    fn borrow(&mut self) -> EightBit<'_> {
        EightBit { codes: &mut self.0, scales: &mut self.1 }
    }

    /// The blocks from one to another.
    fn blocks(&mut self, from: usize, to: usize) -> EightBit<'_> {
        let end = self.0.len().min(to * EIGHT_BIT_BLOCK);
        let codes = &mut self.0[from * EIGHT_BIT_BLOCK..end];
        EightBit { codes, scales: &mut self.1[from..to] }
    }

    fn decoded(&self, moment: Moment) -> Vec<f32> {
        let mut target = vec![7.0; self.0.len()];
        let blocks = target.chunks_mut(EIGHT_BIT_BLOCK).zip(self.0.chunks(EIGHT_BIT_BLOCK));
        for ((target, codes), scale) in blocks.zip(&self.1) {
            decode(moment.map(), target, codes, *scale);
        }
        target
    }
}

#[test]
fn the_maps_are_those_of_the_published_construction() {
    for moment in MOMENTS {
        let expected = by_construction(moment);
        assert_eq!(expected.len(), 256);
        for (number, expected) in moment.numbers().iter().zip(expected) {
            assert!((f64::from(*number) - expected).abs() <= 1e-7 * expected.abs(), "{expected}");
        }
        assert!(moment.numbers().is_sorted_by(|one, other| one < other));
    }
    let [signed, unsigned] = MOMENTS.map(Moment::numbers);
    assert_eq!([signed[127], signed[255], unsigned[0], unsigned[255]], [0.0, 1.0, 0.0, 1.0]);
}

/// All 65,536 bf16 from -1 to 1 and the numbers on both sides of each, and of each middle of two
/// neighbors.
#[test]
fn a_code_is_that_of_the_nearest_number() {
    for moment in MOMENTS {
        let numbers = moment.numbers();
        let middles = numbers.windows(2).map(|pair| f32::midpoint(pair[0], pair[1]));
        let coarse = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
        for value in middles.chain(coarse).flat_map(|it| [it.next_down(), it, it.next_up()]) {
            let in_range = value.abs() <= 1.0 && (moment == Moment::First || value >= 0.0);
            if in_range {
                assert_eq!(
                    moment.map().code(value),
                    nearest(moment, value.into()),
                    "{moment:?}: {value:e}"
                );
            }
        }
    }
}

#[test]
fn an_element_changes_by_at_most_half_of_the_largest_gap() {
    for moment in MOMENTS {
        let mut values = wave(1000, 0.37);
        if moment == Moment::Second {
            values.iter_mut().for_each(|value| *value *= *value);
        }
        let state = on_all_widths(|| {
            let mut state = State::new(1000);
            encode_all(moment, &values, &mut state);
            state
        });
        for (index, (value, decoded)) in values.iter().zip(state.decoded(moment)).enumerate() {
            let block = index / EIGHT_BIT_BLOCK * EIGHT_BIT_BLOCK;
            let all = &values[block..1000.min(block + EIGHT_BIT_BLOCK)];
            let scale = all.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            assert_eq!(state.1[index / EIGHT_BIT_BLOCK], scale);
            // A rounding of the quotient, and one of the product.
            let bound = scale * (largest_gap(moment) / 2.0 + 2.0 * f32::EPSILON);
            assert!((value - decoded).abs() <= bound, "{moment:?}: {value} became {decoded}");
        }
    }
}

#[test]
fn zeros_are_kept_and_what_is_not_finite_is_seen() {
    for moment in MOMENTS {
        assert_eq!(
            State::new(300).decoded(moment),
            [0.0; 300],
            "memory that was filled with zeros"
        );
        let mut state = State::new(300);
        encode_all(moment, &[0.0; 300], &mut state);
        assert_eq!(state.decoded(moment), [0.0; 300]);
        for bad in [f32::NAN, f32::INFINITY] {
            let values: Vec<f32> = (0..300).map(|at| if at == 7 { bad } else { 1.0 }).collect();
            encode_all(moment, &values, &mut state);
            let decoded = state.decoded(moment);
            assert!(decoded[..EIGHT_BIT_BLOCK].iter().all(|value| !value.is_finite()));
            assert_eq!(decoded[EIGHT_BIT_BLOCK..], [1.0; 300 - EIGHT_BIT_BLOCK]);
        }
    }
}

/// The state of one moment in f64, quantized by the search through all numbers. A second moment
/// above 0 is not rounded to 0.
fn quantized(moment: Moment, values: &[f64]) -> Vec<f64> {
    let block = |block: &[f64]| {
        let scale = block.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        let least = |value: &f64| u8::from(moment == Moment::Second && *value > 0.0);
        let code = |value: &f64| nearest(moment, value / scale).max(least(value));
        let number = |value| f64::from(moment.numbers()[usize::from(code(value))]) * scale;
        block.iter().map(number).collect::<Vec<f64>>()
    };
    values.chunks(EIGHT_BIT_BLOCK).flat_map(block).collect()
}

/// Two numbers on both sides of a boundary may get different codes, since one was computed in f32
/// and the other in f64. Then the next update differs by a step between codes. So each step begins
/// with the state that the kernel has left.
#[test]
fn follows_the_definition_at_each_of_many_steps() {
    let len = 600;
    let mut parameter = wave(len, 0.3);
    let mut first = State::new(len);
    let mut second = State::new(len);
    for number in 1..=20 {
        let step = AdamWStep { step: number, ..STEP };
        let gradient = wave(len, number as f32 * 0.7);
        let [m, v] = [first.decoded(Moment::First), second.decoded(Moment::Second)];
        let before = parameter.clone();
        adamw_8bit(&step, &mut parameter, &gradient, [first.borrow(), second.borrow()]);
        let mut new_m = vec![0.0; len];
        let mut new_v = vec![0.0; len];
        for index in 0..len {
            let old = [before[index], m[index], v[index]].map(f64::from);
            let g = f64::from(gradient[index]) * f64::from(step.clip);
            let ([p, m, v], size) = in_f64(&step, old, g);
            // About 8 roundings of 2^-23 of all terms that go into a sum: those of the first moment
            // may cancel out.
            assert!((f64::from(parameter[index]) - p).abs() < 1e-6 * size, "step {number}");
            (new_m[index], new_v[index]) = (m, v);
        }
        same_state(&first.decoded(Moment::First), &quantized(Moment::First, &new_m));
        let decoded = second.decoded(Moment::Second);
        same_state(&decoded, &quantized(Moment::Second, &new_v));
    }
}

/// An element whose second moment is small in its block, and that has no gradient in the next step.
#[test]
fn an_element_without_another_gradient_moves_no_further_than_others() {
    let mut parameter = vec![0.0; 2];
    let mut first = State::new(2);
    let mut second = State::new(2);
    let of = |step| AdamWStep { step, learning_rate: 1e-3, weight_decay: 0.0, ..STEP };
    for (step, gradient) in [(1, [1.0, 3e-4]), (2, [1.0, 0.0])] {
        adamw_8bit(&of(step), &mut parameter, &gradient, [first.borrow(), second.borrow()]);
    }
    assert!(parameter[1].abs() < 4e-3, "{parameter:?}");
    let least = Moment::Second.numbers()[1];
    assert_eq!(second.decoded(Moment::Second)[1], least * second.1[0]);
}

/// One update in f64 as the definition has it, by a clipped gradient; and the sum of the magnitudes
/// of its terms.
fn in_f64(step: &AdamWStep, [p, m, v]: [f64; 3], g: f64) -> ([f64; 3], f64) {
    let [old, taken] = [step.beta1 * m, (1.0 - step.beta1) * g];
    let v = step.beta2 * v + (1.0 - step.beta2) * g * g;
    let v_hat = v / (1.0 - step.beta2.powf(step.step as f64));
    let rate = step.learning_rate / (1.0 - step.beta1.powf(step.step as f64));
    let scale = rate / (v_hat.sqrt() + step.epsilon);
    let kept = p * (1.0 - step.learning_rate * step.weight_decay);
    let size = kept.abs() + scale * (old.abs() + taken.abs());
    ([kept - scale * (old + taken), old + taken, v], size)
}

/// All but a few elements, whose quotients lie on a boundary but for rounding, are the same.
fn same_state(found: &[f32], expected: &[f64]) {
    let same = |(found, expected): &(&f32, &f64)| {
        (f64::from(**found) - **expected).abs() <= 1e-6 * expected.abs()
    };
    let others = found.iter().zip(expected).filter(|pair| !same(pair)).count();
    assert!(others <= 1, "{others} of {} elements differ", found.len());
}

#[test]
fn the_bits_do_not_depend_on_the_machine_or_on_where_a_slice_is_cut_between_blocks() {
    let len = 5 * EIGHT_BIT_BLOCK + 31;
    let gradient = wave(5 * EIGHT_BIT_BLOCK + 31, 0.7);
    let updated = |cuts: &[usize]| {
        let mut parameter = wave(len, 0.2);
        let mut first = State::new(len);
        let mut second = State::new(len);
        for number in 1..=3 {
            let step = AdamWStep { step: number, ..STEP };
            for pair in cuts.windows(2) {
                let range = pair[0] * EIGHT_BIT_BLOCK..len.min(pair[1] * EIGHT_BIT_BLOCK);
                let state = [first.blocks(pair[0], pair[1]), second.blocks(pair[0], pair[1])];
                adamw_8bit(&step, &mut parameter[range.clone()], &gradient[range], state);
            }
        }
        (parameter, first, second)
    };
    let whole = on_all_widths(|| updated(&[0, 6]));
    assert_eq!(updated(&[0, 1, 2, 3, 4, 5, 6]), whole);
    assert_eq!(updated(&[0, 2, 5, 6]), whole);
}

#[test]
#[should_panic(expected = "the number of scales for 257 elements")]
fn each_block_has_a_scale() {
    let mut parameter = vec![0.0; 257];
    let mut first = State::new(257);
    let mut second = State::new(257);
    second.1.pop();
    adamw_8bit(&STEP, &mut parameter, &[0.0; 257], [first.borrow(), second.borrow()]);
}
