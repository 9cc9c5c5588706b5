//! The operations, the reductions and the channels: enums that go by names in texts and in JSON,
//! and by numbers in bytes.

/// Makes an enum: `Name { Variant = "its name", ... }`.
macro_rules! names {
    (
        $(#[$doc:meta])*
        $name:ident {
            $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: [Self; [$($text),*].len()] = [$(Self::$variant),*];

            /// Its name, as it is displayed.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

names! {
    /// A kind of operation.
    Op {
        /// Every member gets the elements of all members, in member order.
        AllGather = "all_gather",
        /// Member `i` gets the reduction of the `i`-th parts of all members.
        ReduceScatter = "reduce_scatter",
        /// Every member gets the reduction of the elements of all members.
        AllReduce = "all_reduce",
        /// Every member gets the root's elements.
        Broadcast = "broadcast",
        /// The root gets the reduction of the elements of all members.
        Reduce = "reduce",
        /// The root gets the elements of all members, in member order.
        Gather = "gather",
        /// Member `i` gets the root's `i`-th part.
        Scatter = "scatter",
        /// Member `i` gets the part that each member cut for it.
        AllToAll = "all_to_all",
        /// Each member sends its elements to at most one member.
        Permute = "permute",
        /// The sending half of a transfer between two members.
        Send = "send",
        /// The receiving half of a transfer between two members.
        Recv = "recv",
        /// Completes when every member has issued it.
        Barrier = "barrier",
    }
}

names! {
    /// The way in which an operation combines the members' elements, always in member order.
    ///
    /// f16 and bf16 are combined in f32 and rounded once; integers wrap around.
    Reduction {
        /// The sum.
        Sum = "sum",
        /// The sum, divided by the number of members. Floating-point dtypes only.
        Avg = "avg",
        /// The product.
        Product = "product",
        /// The smallest; NaN if one is NaN.
        Min = "min",
        /// The largest; NaN if one is NaN.
        Max = "max",
    }
}

names! {
    /// An independent sequence of operations: operations of different channels never meet.
    ///
    /// Gathers and reductions are two channels, so neither queues behind the other. Operations of
    /// users can never meet operations of the runtime.
    Channel {
        /// Gathers of parameters.
        Gather = "gather",
        /// Reductions of gradients over the shard group.
        Reduce = "reduce",
        /// Reductions of partials over the replicate group.
        AllReduce = "all_reduce",
        /// Headers, agreements, exports.
        Control = "control",
        /// Operations that the embedding program issues itself.
        User = "user",
        /// Sums of statistics over all ranks, in the midst of a unit's forward and backward.
        Statistics = "statistics",
    }
}
