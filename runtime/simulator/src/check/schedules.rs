//! The lists of what the hosts of all ranks do.

use std::collections::HashMap;
use std::num::NonZeroU32;

use hsdp_sharding::Rank;

use super::judge::ListedCall;
use crate::Error;

/// The most ranks and communicators, members of all communicators together, actions of all ranks
/// together, and bytes of a name.
pub(super) const MAX_RANKS: usize = 1 << 20;
pub(super) const MAX_COMMUNICATORS: usize = 1 << 20;
const MAX_MEMBERS: usize = 1 << 22;
pub(super) const MAX_ACTIONS: usize = 1 << 22;
const MAX_NAME: usize = 1024;

/// Lists of the actions of all hosts, each in its order: a host issues operations, and waits until
/// they are complete.
///
/// The `n`-th operation of a rank on a communicator meets the `n`-th of every other member.
/// [`judge`](crate::judge) decides whether all of them complete.
///
/// ```
/// use hsdp_sharding::Rank;
/// use hsdp_simulator::{Issue, Schedules, ScheduleVerdict, judge};
///
/// let mut schedules = Schedules::new(2, None)?;
/// let world = schedules.communicator("world", &[Rank::new(0), Rank::new(1)])?;
/// let all_gather =
///     Issue { communicator: world, op: "all_gather", dtype: "f32", count: 1000, stream: 0 };
/// let gathered = schedules.issue(Rank::new(0), all_gather)?;
/// schedules.wait(Rank::new(0), gathered)?;
/// let verdict = judge(&schedules);
/// let expected = "deadlock: rank 0 is stuck: rank 0 waits for all_gather #0 of world, \
///                 which rank 1 never issues";
/// assert_eq!(verdict.to_string(), expected);
///
/// schedules.issue(Rank::new(1), all_gather)?;
/// assert_eq!(judge(&schedules), ScheduleVerdict::Ok);
/// # Ok::<(), hsdp_simulator::Error>(())
/// ```
#[derive(Debug)]
pub struct Schedules {
    pub(super) kernels: Option<NonZeroU32>,
    pub(super) communicators: Vec<ScheduledCommunicator>,
    pub(super) operations: Vec<ScheduledOperation>,
    pub(super) calls: Vec<ListedCall>,
    /// The rank of each stream, and its number there.
    pub(super) streams: Vec<(Rank, u64)>,
    pub(super) hosts: Vec<ListedHost>,
    known: KnownNames,
    members: usize,
    actions: usize,
}

/// A communicator of some [`Schedules`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommunicatorId(pub(super) u32);

/// An operation that a host issues. It goes behind those of its rank and stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Issue<'a> {
    /// The communicator, of which the rank is a member.
    pub communicator: CommunicatorId,
    /// The kind of operation, in the words of any software.
    pub op: &'a str,
    /// The dtype of its elements.
    pub dtype: &'a str,
    /// The number of elements.
    pub count: u64,
    /// The stream: any number, which means nothing on other ranks.
    pub stream: u64,
}

#[derive(Debug)]
pub(super) struct ScheduledCommunicator {
    pub(super) name: String,
    pub(super) ranks: Vec<Rank>,
    /// Its operations, by their place in the order of each member.
    operations: Vec<u32>,
}

/// An operation as all members know it.
#[derive(Debug)]
pub(super) struct ScheduledOperation {
    pub(super) communicator: u32,
    /// The number that it is called by: its place among those of the communicator.
    pub(super) number: u64,
    /// The call of the first member that issues it.
    pub(super) call: u32,
    /// Whether another member issues another call.
    pub(super) differs: bool,
    /// The number of members that issue it.
    pub(super) issuers: u32,
}

/// A rank.
#[derive(Debug, Default)]
pub(super) struct ListedHost {
    pub(super) actions: Vec<ListedAction>,
    pub(super) end: ListEnd,
    /// Its communicators, in ascending order, each with the number of operations that it has issued
    /// there.
    memberships: Vec<(CommunicatorId, usize)>,
}

/// An action of a host.
#[derive(Clone, Copy, Debug)]
pub(super) enum ListedAction {
    Issue {
        operation: u32,
        call: u32,
        stream: u32,
    },
    /// Waits for the operation that the action at `index` has issued.
    Wait {
        index: usize,
        operation: u32,
    },
}

/// The meaning of the end of a rank's actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ListEnd {
    /// The rank does nothing more.
    #[default]
    Finished,
    /// Its record ends there: it may have gone on.
    CutOff,
    /// It has no record.
    Unknown,
}

/// The places of names and the like in the lists.
#[derive(Debug, Default)]
struct KnownNames {
    communicators: HashMap<String, CommunicatorId>,
    names: HashMap<String, u32>,
    calls: HashMap<(u32, u32, u64), u32>,
    streams: HashMap<(Rank, u64), u32>,
}

impl Schedules {
    /// Returns schedules of `ranks` ranks without any action. A rank has at most `kernels` heads of
    /// its streams under way, in the order in which they were issued; `None` is no limit.
    ///
    /// # Errors
    /// [`Error::Schedules`] for more than 1,048,576 ranks.
    pub fn new(ranks: usize, kernels: Option<NonZeroU32>) -> Result<Self, Error> {
        at_most("ranks", ranks, MAX_RANKS)?;
        Ok(Self {
            kernels,
            communicators: Vec::new(),
            operations: Vec::new(),
            calls: Vec::new(),
            streams: Vec::new(),
            hosts: (0..ranks).map(|_| ListedHost::default()).collect(),
            known: KnownNames::default(),
            members: 0,
            actions: 0,
        })
    }

    /// Adds a communicator of these ranks.
    ///
    /// # Errors
    /// [`Error::Schedules`] for a name that is taken, of more than 1024 bytes or with a control
    /// character; a rank that is listed twice or does not exist; more than 1,048,576 communicators,
    /// or 4,194,304 members of all of them together.
    pub fn communicator(&mut self, name: &str, ranks: &[Rank]) -> Result<CommunicatorId, Error> {
        at_most("communicators", self.communicators.len() + 1, MAX_COMMUNICATORS)?;
        at_most("members of communicators", self.members + ranks.len(), MAX_MEMBERS)?;
        check_name(name).map_err(|problem| refused("communicators", problem))?;
        let wrong = |problem: String| refused(format!("communicators.{name}"), problem);
        if self.known.communicators.contains_key(name) {
            return Err(wrong("there are two communicators of this name".to_owned()));
        }
        let size = self.hosts.len();
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(rank) = sorted.last().filter(|rank| rank.index() >= size) {
            return Err(wrong(format!("rank {rank} of {size} ranks")));
        }
        if let Some([rank, _]) = sorted.array_windows().find(|[one, next]| one == next) {
            return Err(wrong(format!("rank {rank} is listed twice")));
        }
        let id = CommunicatorId(number(self.communicators.len()));
        for rank in ranks {
            self.hosts[rank.index()].memberships.push((id, 0));
        }
        self.members += ranks.len();
        self.known.communicators.insert(name.to_owned(), id);
        let name = name.to_owned();
        let ranks = ranks.to_vec();
        self.communicators.push(ScheduledCommunicator { name, ranks, operations: Vec::new() });
        Ok(id)
    }

    /// Has the host of `rank` issue an operation, and returns the index of that action in its list.
    ///
    /// # Errors
    /// [`Error::Schedules`] for a rank that is no member of the communicator, or does not exist; a
    /// name of more than 1024 bytes or with a control character; more than 4,194,304 actions of all
    /// ranks together.
    pub fn issue(&mut self, rank: Rank, issue: Issue<'_>) -> Result<usize, Error> {
        let call = self.check(rank, issue)?;
        let id = issue.communicator;
        let place = self.membership(rank, id)?;
        let (_, issued) = self.hosts[rank.index()].memberships[place];
        let known = self.communicators[id.0 as usize].operations.get(issued).copied();
        let operation = known.unwrap_or_else(|| {
            let new = self.operation(id, issued as u64);
            self.communicators[id.0 as usize].operations.push(new);
            new
        });
        self.hosts[rank.index()].memberships[place] = (id, issued + 1);
        Ok(self.add(rank, operation, call, issue.stream))
    }

    /// Has the host of `rank` wait until the operation that its action `index` has issued is
    /// complete.
    ///
    /// # Errors
    /// [`Error::Schedules`] for an action that comes later, or is a wait; a rank that does not
    /// exist; too many actions.
    pub fn wait(&mut self, rank: Rank, index: usize) -> Result<(), Error> {
        let actions = &self.host(rank)?.actions;
        let kind = match actions.get(index) {
            Some(&ListedAction::Issue { operation, .. }) => {
                self.check_actions()?;
                self.push(rank, ListedAction::Wait { index, operation });
                return Ok(());
            }
            Some(ListedAction::Wait { .. }) => "is a wait",
            None if actions.len() == index => "is the wait itself",
            None => "comes later",
        };
        Err(refused(self.place(rank), format!("it waits for action {index}, which {kind}")))
    }

    /// Returns an operation in words, after its kind: `all_gather #3 of shard0`.
    pub(super) fn named(&self, op: &str, operation: u32) -> String {
        let ScheduledOperation { communicator, number, .. } = self.operations[operation as usize];
        format!("{op} #{number} of {}", self.communicators[communicator as usize].name)
    }

    /// Returns the communicator of this name.
    pub(super) fn find(&self, name: &str) -> Option<CommunicatorId> {
        self.known.communicators.get(name).copied()
    }

    /// Adds an operation that no member has issued yet.
    pub(super) fn operation(&mut self, communicator: CommunicatorId, named: u64) -> u32 {
        let communicator = communicator.0;
        let operation = number(self.operations.len());
        #[rustfmt::skip]
        self.operations.push(ScheduledOperation { communicator, number: named, call: 0, differs: false, issuers: 0 });
        operation
    }

    /// Has the host of `rank` issue this operation, of the same communicator.
    pub(super) fn issue_of(
        &mut self,
        rank: Rank,
        operation: u32,
        issue: Issue<'_>,
    ) -> Result<usize, Error> {
        let call = self.check(rank, issue)?;
        Ok(self.add(rank, operation, call, issue.stream))
    }

    fn add(&mut self, rank: Rank, operation: u32, call: u32, stream: u64) -> usize {
        let new = number(self.streams.len());
        let place = *self.known.streams.entry((rank, stream)).or_insert(new);
        if place == new {
            self.streams.push((rank, stream));
        }
        let known = &mut self.operations[operation as usize];
        known.call = if known.issuers == 0 { call } else { known.call };
        known.differs |= known.call != call;
        known.issuers += 1;
        self.push(rank, ListedAction::Issue { operation, call, stream: place })
    }

    /// Returns the place of the next action of a rank, as JSON has it.
    pub(super) fn place(&self, rank: Rank) -> String {
        let index = self.hosts.get(rank.index()).map_or(0, |host| host.actions.len());
        place(rank, index)
    }

    fn host(&self, rank: Rank) -> Result<&ListedHost, Error> {
        let size = self.hosts.len();
        let wrong = || refused("schedules", format!("rank {rank} of {size} ranks"));
        self.hosts.get(rank.index()).ok_or_else(wrong)
    }

    /// Returns the place of a communicator among those of a member.
    fn membership(&self, rank: Rank, id: CommunicatorId) -> Result<usize, Error> {
        let memberships = &self.host(rank)?.memberships;
        memberships.binary_search_by_key(&id, |(id, _)| *id).map_err(|_| {
            let communicator = self.communicators.get(id.0 as usize);
            let name = communicator.map_or("another list", |it| &it.name);
            refused(self.place(rank), format!("rank {rank} is no member of {name}"))
        })
    }

    /// Returns the number of a call that this rank may issue.
    fn check(&mut self, rank: Rank, issue: Issue<'_>) -> Result<u32, Error> {
        let Issue { communicator, op, dtype, count, .. } = issue;
        self.membership(rank, communicator)?;
        self.check_actions()?;
        let index = self.hosts[rank.index()].actions.len();
        let names = &mut self.known.names;
        let mut name = |name: &str| -> Result<u32, Error> {
            if let Some(known) = names.get(name) {
                return Ok(*known);
            }
            check_name(name).map_err(|problem| refused(place(rank, index), problem))?;
            let new = number(names.len());
            names.insert(name.to_owned(), new);
            Ok(new)
        };
        let key = (name(op)?, name(dtype)?, count);
        let new = number(self.calls.len());
        let call = *self.known.calls.entry(key).or_insert(new);
        if call == new {
            self.calls.push(ListedCall { op: op.to_owned(), dtype: dtype.to_owned(), count });
        }
        Ok(call)
    }

    fn check_actions(&self) -> Result<(), Error> {
        at_most("actions", self.actions + 1, MAX_ACTIONS)
    }

    fn push(&mut self, rank: Rank, action: ListedAction) -> usize {
        self.actions += 1;
        let actions = &mut self.hosts[rank.index()].actions;
        actions.push(action);
        actions.len() - 1
    }
}

fn place(rank: Rank, index: usize) -> String {
    format!("schedules[{rank}][{index}]")
}

/// Limits keep all numbers far below this one.
fn number(index: usize) -> u32 {
    u32::try_from(index).expect("the lists are bounded")
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), Error> {
    match count > most {
        true => Err(refused("schedules", format!("more than {most} {what}"))),
        false => Ok(()),
    }
}

pub(super) fn refused(place: impl Into<String>, problem: impl Into<String>) -> Error {
    Error::Schedules { place: place.into(), problem: problem.into() }
}

/// Names are parts of a line.
fn check_name(name: &str) -> Result<(), String> {
    if name.len() > MAX_NAME {
        return Err(format!("a name has {} bytes; at most {MAX_NAME} are allowed", name.len()));
    }
    match name.chars().find(|character| character.is_control()) {
        Some(character) => {
            Err(format!("the name {name:?} has the control character {character:?}"))
        }
        None => Ok(()),
    }
}
