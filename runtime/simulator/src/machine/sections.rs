//! The tables of a machine file.

use serde::Deserialize;

use super::quantity::{NumberMut, Quantity};
use super::unit::{Bytes, BytesPerSecond, Count, Flop, FlopPerSecond, Ratio, Seconds};

/// Tables of numbers. A number is one line here: the file, [`numbers`](super::Machine::numbers) and [`set`](super::Machine::set)
/// follow from it.
macro_rules! sections {
    ($(
        $(#[$doc:meta])*
        $name:ident { $($(#[$number_doc:meta])* $number:ident: $measure:ident,)* }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, PartialEq, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $name {
                $($(#[$number_doc])* pub $number: Quantity<$measure>,)*
            }

            impl $name {
                /// Calls `visit` for each number; `table` is the name of this table.
                pub(super) fn visit(&mut self, table: &str, visit: &mut dyn FnMut(NumberMut<'_>)) {
                    $(visit(self.$number.number_mut(format!("{table}.{}", stringify!($number))));)*
                }
            }
        )*
    };
}

sections! {
    /// The memory in which ranks compute.
    Memory {
        /// Bytes of a card, or of the host.
        capacity: Bytes,
        /// Bytes read and written a second, of a card, or of the host with all its cores.
        bandwidth: BytesPerSecond,
        /// The part of the bandwidth that a pass over large buffers gets.
        efficiency: Ratio,
    }

    /// The computation of a rank on a card, or of a core of a host.
    Compute {
        /// Peak of products of matrices in f32.
        f32: FlopPerSecond,
        /// Peak of products of matrices in bf16.
        bf16: FlopPerSecond,
        /// Peak of products of matrices in f16.
        f16: FlopPerSecond,
        /// The part of the peak that large products get.
        efficiency: Ratio,
        /// Part of the peak that products get if the bytes of a stride are no multiple of 16; above
        /// `efficiency` it counts as that.
        unaligned: Ratio,
        /// The operations of a product that gets half of that part.
        half: Flop,
        /// Time of the host's thread for the launch of a kernel; of a host, for a call of one.
        launch: Seconds,
        /// Time of a kernel on the card beyond that of its operations or bytes.
        kernel: Seconds,
    }

    /// The costs of a call of a collective, whatever its bytes.
    Calls {
        /// Time of the rank's thread to issue one.
        issue: Seconds,
        /// Time from the moment at which the last member is ready to the first byte that moves, beyond NCCL's own constants; of a
        /// host, the time of a meeting of ranks that have a core each.
        start: Seconds,
    }

    /// Threads that share the cores of a host.
    Threads {
        /// Time until a thread that slept runs on a core that another had.
        switch: Seconds,
    }

    /// The host of a machine with cards: its memory, for what cards offload, and its messages.
    DeviceHost {
        /// Bytes of memory of a machine, for all its cards together.
        capacity: Bytes,
        /// Bytes of that memory read and written a second, by all its cores.
        memory: BytesPerSecond,
        /// Bytes a second between a card and its host, in one direction.
        bandwidth: BytesPerSecond,
        /// The part of the bandwidth that large copies get.
        efficiency: Ratio,
        /// Time of a message from a rank's process to another's, as an exchange on the control channel sends it.
        message: Seconds,
    }

    /// The links between the cards of a machine.
    Link {
        /// Time of a step of a ring with NCCL's protocol Simple.
        latency: Seconds,
        /// Bytes a second that a card sends while it receives as many.
        bandwidth: BytesPerSecond,
        /// The part of the bandwidth that large collectives get.
        efficiency: Ratio,
    }

    /// The network between machines.
    NetworkLink {
        /// Time of a step of a ring with NCCL's protocol Simple.
        latency: Seconds,
        /// Bytes a second that a machine sends while it receives as many, by all its adapters.
        bandwidth: BytesPerSecond,
        /// The number of its adapters: a card uses one at a time.
        adapters: Count,
        /// The part of the bandwidth that large collectives get.
        efficiency: Ratio,
    }
}

/// The links between cards, by level.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Between the cards of a machine.
    pub machine: Link,
    /// Between machines; none if there is only one.
    pub network: Option<NetworkLink>,
}
