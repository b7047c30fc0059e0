# Runs a command once and answers for it, at once when it is short. Arguments: a path of its own, mark,
# tag, the programs `again.pl` and `follow.pl`, directory, working directory, number of files to drop, these,
# number of variables, these, command.
# The answer is the mark and: "=CODE;LEADER;OUT;ERR;" it has ended, the streams in base64;
# "+LEADER;" it goes on, and can be followed (`follow.pl`); "!" nothing was run; "-" it was run before,
# and its answer is lost.
# Perl's own functions only, and nothing compiled that a short command does not need: both cost more than all of this.
my ($b, $m, $tag, $again, $follow, $dir, $work, $n, @c) = @ARGV;
delete $ENV{PERL_BADLANG};
unlink splice @c, 0, $n;
$n = shift @c;
my @env = splice @c, 0, $n;
sub answer { syswrite $_[0], "$m$_[1]\n"; exit 0 }
if (!sysopen K, $b, 193, 0600) {    # write, create, only if it is not there
	answer(*STDOUT, "!;") if $! != 17;
	eval $again;
}
pipe(A, B) or answer(*STDOUT, "!;");
my $front = fork;
answer(*STDOUT, "!;") if !defined $front;
if ($front) {
	close B;
	my $all = "";
	1 while sysread A, $all, 1 << 18, length $all;
	syswrite STDOUT, $all;
	exit 0;
}
setpgrp(0, 0);
open STDIN, "<", "/dev/null";
open STDOUT, ">", "/dev/null";
open STDERR, ">", "/dev/null";
syswrite K, $$;
close K;
close A;
pipe(O, P) && pipe(E, F) && pipe(R, W) or answer(*B, "!;");
my $pid = fork;
answer(*B, "!;") if !defined $pid;
if (!$pid) {
	setpgrp(0, 0);
	open STDOUT, ">&P";
	open STDERR, ">&F";
	sub fail { syswrite STDERR, "cd: $_[0]: $!\n"; exit 126 }
	if (length $dir) { chdir $dir or fail($dir) }
	elsif (length $work && !chdir $work) {
		my $made = "";
		for (split m{/}, $work) { $made .= "$_/"; mkdir $made }
		chdir $work or fail($work);
	}
	for (@env) { my ($name, $value) = split /=/, $_, 2; $ENV{$name} = $value }
	# The tag is a limit nothing else uses. How it is set is the processor's business.
	my ($head, $r) = ("", pack "QQ", $tag, $tag);
	if (open X, "<", "/proc/self/exe") { sysread X, $head, 20 }
	my $call = { 62 => 160, 183 => 164, 243 => 164 }->{unpack "x18v", $head . "\0" x 20};
	if ($call) { syscall $call, 10, $r }
	else { unshift @c, "/bin/sh", "-c", 'ulimit -w $0 2>/dev/null||ulimit -x $0 2>/dev/null;exec "$@"', $tag }
	exec { $c[0] } @c;
	my $code = $! == 2 ? 127 : 126;
	syswrite STDERR, "$c[0]: " . ($code == 127 ? "not found" : $!) . "\n";
	exit $code;
}
$SIG{PIPE} = "IGNORE";
$SIG{CHLD} = sub { syswrite W, "x" };
syswrite W, "x";    # it may have ended before we listened
close P;
close F;
my ($code, $size, $left) = (undef, 0, 0.15);
my %open = (1 => *O, 2 => *E);
my %held = (1 => "", 2 => "");
sub encoded {
	my ($d) = @_;
	return "" if !length $d;
	my $x = pack("u", $d);
	$x =~ s/^.//mg;
	$x =~ tr/\n//d;
	$x =~ tr|` -_|AA-Za-z0-9+/|;
	my $pad = (3 - length($d) % 3) % 3;
	substr($x, -$pad) = "=" x $pad if $pad;
	return $x;
}
sub all { my ($f, $d) = @_; while (length $d) { my $n = syswrite $f, $d; if (defined $n) { substr($d, 0, $n) = "" } elsif ($! != 4) { last } } }
sub answered {    # kept first: it may be asked for again
	if (sysopen T, "$b.t", 193, 0600) { all(*T, "$m$_[0]\n"); close T; rename "$b.t", "$b.a" }
	all(*B, "$m$_[0]\n");
	close B;
}
sub heard { my ($s, $d) = @_; $held{$s} .= $d; $left = 0.1 if !$size && $left > 0.1; $size += length $d }
my $heard = \&heard;
sub take {        # false at the end of the stream
	my ($s) = @_;
	my $n = sysread $open{$s}, my $d, 65536;
	return 1 if !defined $n;
	if (!$n) { close $open{$s}; delete $open{$s}; return 0 }
	$heard->($s, $d);
	return 1;
}
sub ready { my ($s) = @_; my $r = ""; vec($r, fileno $open{$s}, 1) = 1; return select($r, undef, undef, 0) > 0 }
sub turn {        # true when nothing came in time
	my $r = "";
	vec($r, fileno R, 1) = 1 if !defined $code;
	vec($r, fileno $_, 1) = 1 for values %open;
	(my $found, my $rest) = select($r, undef, undef, $left);
	return 0 if $found < 0;
	return 1 if !$found;
	$left = $rest if defined $left;
	for my $s (1, 2) { take($s) if $open{$s} && vec($r, fileno $open{$s}, 1) }
	if (!defined $code && vec($r, fileno R, 1)) {
		sysread R, my $x, 64;
		if (waitpid($pid, 1) == $pid) {
			$code = $? & 127 ? 128 + ($? & 127) : $? >> 8;
			# What a pipe holds is soon read; whoever goes on writing is not the command.
			for my $s (1, 2) { my $n = 16; 1 while $n-- && $open{$s} && ready($s) && take($s) }
		}
	}
	return 0;
}
while (!defined $code) {
	eval $follow if turn() || $size > 98304 && defined $left && !defined $code;
}
answered("=$code;$pid;" . encoded($held{1}) . ";" . encoded($held{2}) . ";");
($heard, $left) = (sub { }, undef);    # whoever still holds the streams may go on
turn() while %open;
