"""The registrar of an elastic run: from who came, died and finished it makes rosters. It does nothing else."""

from .board import Member, Order, Roster, Terms


class Registrar:
    """Keeps the members in the order of their ranks: who stays keeps the order, who comes is put at the end.

    So rank 0, which alone writes files, is another process only when the one before it has gone.
    """

    def __init__(self, members: list[Member], terms: Terms) -> None:
        self.terms = terms
        self.members = list(members)
        self.spares: list[Member] = []
        """Those that could take part at once: the run has no replica for them, or no roster names them yet."""
        self.starting: set[Member] = set()
        """Replacements that are being started."""
        self.waiting_to_begin = set(members)
        self.joined = set(members)
        """Those that have the run's state."""
        self.finished: set[Member] = set()
        self.replicas = len(members)
        """No more processes than this can take part."""
        self.roster = Roster(1, tuple(members))
        self.renewed = False

    @property
    def running(self) -> bool:
        """Whether every first member has begun to train, so that the others can go on when one dies."""
        return not self.waiting_to_begin

    def begin(self, member: Member, replicas: int) -> None:
        """A first member has begun to train."""
        self.waiting_to_begin.discard(member)
        self.replicas = replicas

    def add(self, member: Member) -> None:
        """A process is ready to take part."""
        self.starting.discard(member)
        if member not in self.members:
            self.spares.append(member)

    def remove(self, member: Member) -> bool:
        """A process has died; return whether it took part."""
        self.starting.discard(member)
        self.spares = [spare for spare in self.spares if spare != member]
        took_part = member in self.members
        self.members = [other for other in self.members if other != member]
        return took_part

    def finish(self, member: Member) -> None:
        """A member has done its work; so has everyone who trained with it, and there is nothing more to join."""
        self.remove(member)
        self.finished.add(member)
        self.spares += [other for other in self.members if other not in self.joined]
        self.members = [other for other in self.members if other in self.joined]

    def renew(self, version: int) -> None:
        """The group of a roster broke although nobody died: let its members form another one."""
        self.renewed |= version == self.roster.version

    def decide(self) -> Roster | None:
        """Return the next roster, where one is due."""
        if not self.running or not self.members:
            return None
        if not self.finished and self.roster.order != "leave":
            room = self.replicas - len(self.members)
            self.members += self.spares[:room] if room > 0 else []
            self.spares = [spare for spare in self.spares if spare not in self.members]
        order: Order = "train"
        if len(self.members) < self.terms.min_processes and not self.finished:
            order = "wait" if self.starting else "leave"
        if self.roster.order == "leave":
            order = "leave"
        following = Roster(self.roster.version + 1, tuple(self.members), order)
        if (following.members, order) == (self.roster.members, self.roster.order) and not self.renewed:
            return None
        self.roster, self.renewed = following, False
        return following
